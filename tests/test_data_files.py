"""The program's data files: which are named, and whether they are what they pass for."""

import os

import numpy as np
import pytest
from token_data import opened, written

from absl_apps import corpus, data_files

TOKENS = {"vocab_size": 100, "document_end": 9}


########################################## Which files ###########################################


@pytest.fixture
def texts(tmp_path):
    for name, content in {"b.txt": "bee", "a.txt": "ay", "c.md": "sea", "sub/d.txt": "dee"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "content"),
    [
        (["*.txt"], b"aybee"),
        (["c.md", "*.txt"], b"seaaybee"),
        (["**/*.txt"], b"aybeedee"),
        (["b.txt", "*.txt"], b"beeay"),
        (["*"], b"aybeesea"),
    ],
    ids=["glob", "order-given", "recursive", "once-each", "no-directories"],
)
def test_files_in_a_fixed_order(texts, patterns, content):
    data = opened(*corpus.find_files([str(texts / pattern) for pattern in patterns]))
    assert data.read(0, data.size)[0].tobytes() == content


def test_a_path_with_glob_characters_is_a_path(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert corpus.find_files([str(tmp_path / "a[1].txt")]) == [str(tmp_path / "a[1].txt")]


def test_every_unmatched_pattern_is_named(texts):
    missing, directory = str(texts / "*.csv"), str(texts / "sub")
    with pytest.raises(ValueError, match=r"^--text: no file matches") as error:
        corpus.find_files([missing, str(texts / "*.txt"), directory], flag="--text")
    assert missing in str(error.value)
    assert f"{directory}/**/*.txt" in str(error.value)
    assert str(texts / "*.txt") not in str(error.value)


def test_what_is_no_regular_file_is_not_read():
    with pytest.raises(ValueError, match=r"^--data: no file matches /dev/null \(no regular file\)"):
        corpus.find_files(["/dev/null"])


def test_no_pattern_matches_no_file():
    with pytest.raises(ValueError, match=r"^--data: no file matches an empty list\.$"):
        corpus.find_files([])


def test_default_text_is_there():
    data = opened(*corpus.find_files([corpus.default_pattern()]), max_bytes=100_000)
    assert (data.size, data.dtype, data.vocab_size) == (100_000, np.uint8, 256)


############################################ Mistakes ############################################


@pytest.mark.parametrize(
    ("contents", "given", "message"),
    [
        ([b"ab\0d"], {}, r"--data: \S+0\.txt: byte 2 \(from 0\) is NUL, so it is binary or UTF-16"),
        (
            [[1, 2, 300, 4]],
            TOKENS,
            r"0\.bin: token 2 \(from 0\) is 300, not below --vocab_size=100",
        ),
        ([b"", b""], {}, r"--data: no byte in \S+0\.txt \(and 1 more\)\."),
        ([[], []], TOKENS, r"--data: no token in \S+0\.bin \(and 1 more\)\."),
        ([[1]], {**TOKENS, "max_bytes": 1}, r"no token in the first 1 bytes of \S+0\.bin\."),
        (
            [b"a", [1]],
            TOKENS,
            r"--data: token files and text cannot be mixed: \S+1\.bin, but \S+t\.",
        ),
        (
            [b"a"],
            {"vocab_size": 5},
            r"--vocab_size=5: \S+ is text, whose vocabulary is the 256 byte",
        ),
        ([b"a"], {"document_end": 9}, r"--document_end=9: \S+ is text, of which each file is one"),
        ([[1]], {}, r"--vocab_size: \S+0\.bin holds tokens, .* give it: 50257 for GPT-2's"),
        ([[1]], {"vocab_size": 0}, r"--vocab_size=0: is not at least 1"),
        (
            [[1]],
            {"vocab_size": 100, "document_end": 100},
            r"--document_end=100: is none of the tokens 0 to 99 of --vocab_size=100",
        ),
        ([], {}, r"--data: no file is named"),
    ],
    ids=[
        "binary",
        "token-too-large",
        "empty-text",
        "empty-tokens",
        "limit-below-a-token",
        "mixture",
        "text-with-vocab",
        "text-with-end",
        "tokens-without-vocab",
        "vocab-zero",
        "end-outside",
        "none",
    ],
)
def test_a_mistake_is_named_with_its_numbers(tmp_path, contents, given, message):
    with pytest.raises(ValueError, match=message) as error:
        opened(*written(tmp_path, contents), **given)
    assert "\n" not in str(error.value)


def test_every_mistake_is_the_flags(tmp_path):
    with pytest.raises(ValueError, match=r"^--eval_data: "):
        corpus.open_corpus(
            [str(tmp_path / "x")],
            flag="--eval_data",
            max_bytes=None,
            vocab_size=None,
            document_end=None,
        )


def test_the_first_bad_token_is_found_in_any_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "_CHUNK", 4)
    for bad in range(10):
        tokens = [1] * 10
        tokens[bad:] = [100 + i for i in range(10 - bad)]
        with pytest.raises(ValueError, match=rf"token {bad} \(from 0\) is 100, not below"):
            opened(*written(tmp_path, [tokens]), vocab_size=100)
        text = b"x" * bad + b"\0" * (10 - bad)
        with pytest.raises(ValueError, match=rf"byte {bad} \(from 0\) is NUL"):
            opened(*written(tmp_path, [text]))
    assert opened(*written(tmp_path, [[99] * 10]), vocab_size=100).size == 10
    assert opened(*written(tmp_path, [bytes(range(1, 256))])).size == 255


def test_a_file_cut_in_mid_token_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\1\0\2")
    with pytest.raises(ValueError, match=r"a\.bin: has 3 bytes, an odd number, but .* uint16"):
        opened(tmp_path / "a.bin", vocab_size=100)


@pytest.mark.parametrize(
    ("magic", "message"),
    [
        (
            20240520,
            r"header of 1,024 bytes, which are no tokens; tail -c \+1025 \S+a\.bin > OUT\.b",
        ),
        (20240801, "header of uint32 tokens; only uint16 tokens are read"),
    ],
    ids=["gpt2", "llama3"],
)
def test_llm_cs_header_is_refused(tmp_path, magic, message):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, 2
    (tmp_path / "a.bin").write_bytes(header.tobytes() + np.asarray([5, 6], "<u2").tobytes())
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / "a.bin", vocab_size=65536)
    if magic == 20240520:  # the remedy
        (tmp_path / "b.bin").write_bytes((tmp_path / "a.bin").read_bytes()[1024:])
        assert opened(tmp_path / "b.bin", vocab_size=100).read(0, 2)[0].tolist() == [5, 6]


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"--data: \S+gone\.txt: No such file or directory\."):
        opened(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=": is a directory"):
        opened(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: is no regular file"):
        opened(tmp_path / "pipe")
    (file,) = written(tmp_path, [b"secret"])

    def refuse(*args):  # the superuser may read everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(data_files, "open", refuse, raising=False)
    with pytest.raises(ValueError, match=r"0\.txt: Permission denied\."):
        opened(file)


def test_bad_files_are_named_together_three_at_most(tmp_path):
    files = written(tmp_path, [b"\0", b"fine", b"\0", b"\0", b"\0", b"\0"])
    with pytest.raises(ValueError, match="and 2 more of 6 files") as error:
        opened(*files)
    named = [i for i, file in enumerate(files) if str(file) in str(error.value)]
    assert named == [0, 2, 3]
    with pytest.raises(ValueError, match=r"0\.txt: .*; .*2\.txt: [^;]*$"):
        opened(*files[:3])


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    (file,) = written(tmp_path, [b"four"])
    monkeypatch.setattr(data_files, "size", lambda *_: 9)
    with pytest.raises(ValueError, match="ended after 4 of 9 tokens"):
        opened(file)
