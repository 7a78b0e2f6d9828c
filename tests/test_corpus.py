"""Files as one array of tokens: what is read, where documents begin, what is mapped and sampled."""

import itertools
import math
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from token_data import opened, written

from absl_apps import corpus, data_files

######################################## What they hold ##########################################


@hypothesis.given(
    contents=st.lists(st.lists(st.integers(0, 12), max_size=9), max_size=5),
    end=st.none() | st.integers(0, 12),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    mapped=st.booleans(),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_tokens_and_beginnings_are_those_of_the_files(contents, end, bounds, mapped):
    hypothesis.assume(any(contents))
    tokens = [t for content in contents for t in content]
    begins = []
    for content in contents:
        ends = [True, *(t == end for t in content)]
        begins += ends[: len(content)]
    start, stop = sorted(round(x * len(tokens)) for x in bounds)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        if mapped:
            patch.setattr(corpus, "_SMALL", 0)
            patch.setattr(corpus, "_MAPPED", 1)
        data = opened(*written(pathlib.Path(directory), contents), vocab_size=13, document_end=end)
        got, got_begins = data.read(start, stop)
    assert (data.size, data.dtype) == (len(tokens), np.uint16)
    assert got.tolist() == tokens[start:stop]
    assert got_begins.tolist() == begins[start:stop]


def test_reading_past_the_end_is_an_error(tmp_path):
    data = opened(*written(tmp_path, [b"abc"]))
    for start, stop in [(0, 4), (-1, 2), (2, 1)]:
        with pytest.raises(IndexError, match=f"tokens {start}:{stop} of 3"):
            data.read(start, stop)


@pytest.mark.parametrize(
    ("contents", "limit", "held"),
    [
        ([b"ay", b"bee"], 4, list(b"aybe")),
        ([b"ay", b"bee"], 2, list(b"ay")),
        ([b"ay", b"bee"], 9, list(b"aybee")),
        ([[1, 2], [3, 4]], 5, [1, 2]),
        ([[1, 2], [3, 4]], 6, [1, 2, 3]),
        ([[1, 2], [3, 4]], 7, [1, 2, 3]),
    ],
    ids=["within", "at-a-border", "beyond", "half-a-token", "token", "token-and-a-half"],
)
def test_the_limit_counts_bytes_over_files(tmp_path, contents, limit, held):
    vocab_size = None if isinstance(contents[0], bytes) else 100
    data = opened(*written(tmp_path, contents), max_bytes=limit, vocab_size=vocab_size)
    assert data.read(0, data.size)[0].tolist() == held
    assert len(data.files) == (1 if len(held) == 2 else 2)


def test_what_lies_beyond_the_limit_is_not_looked_at(tmp_path):
    files = written(tmp_path, [b"fine\0", b"\0"])
    assert opened(*files, max_bytes=4).size == 4
    with pytest.raises(ValueError, match="NUL"):
        opened(*files, max_bytes=5)


def test_an_empty_file_among_others_is_fine(tmp_path):
    data = opened(*written(tmp_path, [b"", b"ab", b"", b"c"]))
    tokens, begins = data.read(0, 3)
    assert tokens.tobytes() == b"abc"
    assert begins.tolist() == [True, False, True]
    assert [os.path.basename(file) for file in data.files] == ["1.txt", "3.txt"]


def test_a_large_file_is_mapped_not_read(tmp_path):
    """10 GB, as a hole of the file system."""
    file = tmp_path / "huge.bin"
    with open(file, "wb") as stream:
        stream.truncate(10 << 30)
        stream.seek(-4, os.SEEK_END)
        stream.write(bytes([7, 0, 8, 0]))
    parts = [corpus._Part(str(file), 5 << 30, None)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = corpus.Corpus(parts, data_files.TOKEN, 100, 8)
    assert data.read(data.size - 2, data.size)[0].tolist() == [7, 8]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 64 << 10


def test_small_files_are_read_up_to_a_sum(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_SMALL", 3)
    monkeypatch.setattr(corpus, "_RESIDENT", 4)
    data = opened(*written(tmp_path, [b"ab", b"cde", b"fg", b"hi"]))
    assert [part.resident is not None for part in data._parts] == [True, False, True, False]
    assert data.read(0, 9)[0].tobytes() == b"abcdefghi"


def test_more_files_than_there_are_descriptors(tmp_path):
    """Each map takes a file descriptor, so not all files may be mapped at a time."""
    program = """
import resource, sys
from absl_apps import corpus
corpus._SMALL = 0  # all are mapped
corpus._MAPPED = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
data = corpus.open_corpus(sys.argv[2:], max_bytes=None, vocab_size=None, document_end=None)
print(data.read(0, data.size)[0].tobytes().decode())
"""
    files = written(tmp_path, [b"%d," % i for i in range(100)])

    def run(mapped):
        command = [sys.executable, "-c", program, mapped, *map(str, files)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("20").stdout.strip() == "".join(f"{i}," for i in range(100))
    assert "Too many open files" in run("100").stderr


##################################### What tells data apart ######################################


def test_a_fingerprint_tells_data_apart_and_not_names(tmp_path):
    def of(contents, name, **given):
        directory = tmp_path / name
        directory.mkdir()
        return opened(*written(directory, contents), **given).fingerprint()

    first = of([b"a text", b"b"], "first")
    assert first == of([b"a text", b"b"], "again")
    assert re.fullmatch("[0-9a-f]{16}", first)
    others = [
        of([b"a texT", b"b"], "other-byte"),
        of([b"a tex", b"tb"], "other-border"),
        of([b"b", b"a text"], "other-order"),
        of([b"a text", b"b"], "cut", max_bytes=6),
        of([[1, 2, 3]], "tokens", vocab_size=10),
        of([[1, 2, 3]], "other-vocab", vocab_size=11),
        of([[1, 2, 3]], "other-end", vocab_size=10, document_end=2),
    ]
    assert len({first, *others}) == 8


def test_samples_of_much_data_reach_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_BLOCK", 4)
    data = opened(*written(tmp_path, [range(40), range(40, 99)]), vocab_size=100)
    every = list(itertools.chain.from_iterable(data._blocks(99)))
    assert every == list(range(99))
    some = [block.tolist() for block in data._blocks(12)]
    assert some == [[0, 1, 2, 3], [47, 48, 49, 50], [95, 96, 97, 98]]


@pytest.mark.parametrize(
    ("content", "nats"),
    [
        (b"aaaa", 0.0),
        (b"abab", math.log(2)),
        (b"aabc", 1.5 * math.log(2)),  # 1/2, 1/4, 1/4: 1.5 bits
        (bytes(range(1, 256)), math.log(255)),
        ([7, 50_000, 7, 50_000], math.log(2)),
    ],
    ids=["one", "two", "skewed", "uniform", "tokens"],
)
def test_unigram_entropy_by_hand(tmp_path, monkeypatch, content, nats):
    monkeypatch.setattr(corpus, "_BLOCK", 3)  # counts of several blocks
    vocab_size = None if isinstance(content, bytes) else 50_257
    data = opened(*written(tmp_path, [content]), vocab_size=vocab_size)
    assert data.unigram_entropy() == pytest.approx(nats)
