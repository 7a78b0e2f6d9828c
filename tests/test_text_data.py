"""The program's data: which files, what entropy, which sequences."""

import math

import numpy as np
import pytest

from absl_apps import text_data


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
    files = text_data.find_files([str(texts / pattern) for pattern in patterns])
    assert text_data.load(files, limit=100).tobytes() == content


def test_a_path_with_glob_characters_is_a_path(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert text_data.find_files([str(tmp_path / "a[1].txt")]) == [str(tmp_path / "a[1].txt")]


def test_every_unmatched_pattern_is_named(texts):
    missing, directory = str(texts / "*.csv"), str(texts / "sub")
    with pytest.raises(ValueError, match="no file matches") as error:
        text_data.find_files([missing, str(texts / "*.txt"), directory])
    assert missing in str(error.value)
    assert f"{directory}/**/*.txt" in str(error.value)
    assert str(texts / "*.txt") not in str(error.value)


def test_limit_counts_bytes_over_files(texts):
    files = text_data.find_files([str(texts / "*.txt")])
    assert text_data.load(files, limit=4).tobytes() == b"aybe"


def test_empty_files_are_an_error(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"no byte in .*empty\.txt"):
        text_data.load([str(tmp_path / "empty.txt")], limit=100)


def test_data_must_hold_one_sequence():
    text_data.check_length(np.zeros(9, np.uint8), seq_len=8)
    with pytest.raises(ValueError, match=r"8 bytes are fewer than seq_len \+ 1 = 8 \+ 1 = 9"):
        text_data.check_length(np.zeros(8, np.uint8), seq_len=8)


@pytest.mark.parametrize(
    ("text", "nats"),
    [
        (b"aaaa", 0.0),
        (b"abab", math.log(2)),
        # 1/2, 1/4, 1/4: 1.5 bits
        (b"aabc", 1.5 * math.log(2)),
        (bytes(range(256)), math.log(256)),
    ],
    ids=["one", "two", "skewed", "uniform"],
)
def test_unigram_entropy_by_hand(text, nats):
    assert text_data.unigram_entropy(np.frombuffer(text, np.uint8)) == pytest.approx(nats)


def test_sequences_are_cut_from_the_text_and_reach_both_ends():
    data = np.arange(7, dtype=np.uint8)
    sequences = text_data.sample(data, seed=0, step=0, batch=200, length=5)
    assert sequences.shape == (200, 5)
    assert sequences.dtype == np.uint8
    assert {tuple(s) for s in sequences} == {tuple(range(s, s + 5)) for s in range(3)}


def test_a_batch_is_a_function_of_seed_and_step():
    data = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8)
    batches = {
        (seed, step): text_data.sample(data, seed, step, 4, 32).tobytes()
        for seed in range(3)
        for step in range(3)
    }
    assert len(set(batches.values())) == 9
    assert text_data.sample(data, 2, 1, 4, 32).tobytes() == batches[2, 1]


@pytest.mark.parametrize("rows", [[0, 1], [7, 3, 3], [], range(8)], ids=str)
def test_some_rows_of_a_batch_are_those_rows(rows):
    data = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8)
    some = text_data.sample(data, 0, 5, 8, 32, np.asarray(rows, int))
    assert some.shape == (len(rows), 32)
    np.testing.assert_array_equal(some, text_data.sample(data, 0, 5, 8, 32)[np.asarray(rows, int)])


def test_a_checksum_tells_data_apart():
    data = np.frombuffer(b"a text", np.uint8)
    assert text_data.checksum(data) == text_data.checksum(data.copy())
    assert text_data.checksum(data) != text_data.checksum(data[:-1])
    assert text_data.checksum(data) != text_data.checksum(data[::-1].copy())


def test_default_text_is_there():
    files = text_data.find_files([text_data.default_pattern()])
    assert text_data.load(files, limit=1000).size == 1000
