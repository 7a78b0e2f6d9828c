"""Sequences of a corpus, and their batches: which targets, and in what order."""

import math
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from token_data import numbered, opened, positions, written

from absl_apps import batches


@pytest.fixture
def corpus(tmp_path):
    return numbered(tmp_path)


########################################### Sequences ############################################


@hypothesis.given(
    contents=st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=4),
    end=st.none() | st.integers(0, 5),
    seq_len=st.integers(1, 7),
    cut=st.floats(0, 1),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_every_target_stands_in_one_sequence(contents, end, seq_len, cut):
    hypothesis.assume(any(contents))
    with tempfile.TemporaryDirectory() as directory:
        files = written(pathlib.Path(directory), contents)
        data = opened(*files, vocab_size=6, document_end=end)
    tokens, begins = data.read(0, data.size)
    count = math.ceil((data.size - 1) / seq_len)
    middle = round(cut * count)
    parts = batches.Sequences(data, seq_len, 0, middle), batches.Sequences(data, seq_len, middle)
    assert sum(map(len, parts)) == count == len(batches.Sequences(data, seq_len))
    got = [part[i] for part in parts for i in range(len(part))]
    for element in got:
        assert element["tokens"].shape == (seq_len + 1,)
        assert element["tokens"].dtype == data.dtype
        assert element["mask"].shape == (seq_len,)
    inputs = np.array([element["tokens"][:-1] for element in got]).reshape(-1)
    targets = np.array([element["tokens"][1:] for element in got]).reshape(-1)
    masks = np.array([element["mask"] for element in got]).reshape(-1)
    real = data.size - 1
    assert inputs[:real].tolist() == tokens[:-1].tolist()
    assert targets[:real].tolist() == tokens[1:].tolist()
    assert masks.tolist() == [*~begins[1:], *[False] * (masks.size - real)]
    assert not targets[real:].any()


def test_a_sequence_by_hand(tmp_path):
    """Two files; 9 ends a document. What begins one is no target, what ends one is."""
    data = opened(*written(tmp_path, [[1, 2, 9, 3], [4, 5, 6]]), vocab_size=10, document_end=9)
    first, last = (batches.Sequences(data, 4)[i] for i in range(2))
    assert first["tokens"].tolist() == [1, 2, 9, 3, 4]
    assert first["mask"].tolist() == [True, True, False, False]
    assert last["tokens"].tolist() == [4, 5, 6, 0, 0]
    assert last["mask"].tolist() == [True, True, False, False]


def test_sequences_outside_are_errors(corpus):
    part = batches.Sequences(corpus, 10, 3, 5)
    assert (len(part), part[1]["tokens"][0]) == (2, 40)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sequence {index} of 2"):
            part[index]
    with pytest.raises(ValueError, match="Sequences: 3:102 of 101 sequences"):
        batches.Sequences(corpus, 10, 3, 102)


########################################### Splitting ############################################


@pytest.mark.parametrize(
    ("fraction", "held"), [(0, 0), (0.001, 1), (0.1, 11), (0.5, 51), (0.99, 100)], ids=str
)
def test_the_last_sequences_are_held_out(corpus, fraction, held):
    train, held_out = batches.split(corpus, 10, fraction)
    assert len(train) == 101 - held
    assert (train.first, train.last) == (0, 101 - held)
    assert (held_out is None) == (held == 0)
    if held:
        assert (held_out.first, held_out.last) == (101 - held, 101)


def test_a_fraction_is_taken_as_it_is_written(tmp_path):
    data = opened(*written(tmp_path, [range(1001)]), vocab_size=2000)
    assert 0.07 * 100 > 7  # as ceil(0.07 * 100) would have it
    assert len(batches.split(data, 10, 0.07)[1]) == 7


@pytest.mark.parametrize(
    ("contents", "seq_len", "fraction", "message"),
    [
        (
            [range(10)],
            10,
            0,
            r"--data: 10 tokens hold 0 whole sequences of --seq_len=10 \+ 1; give more data",
        ),
        (
            [range(11)],
            10,
            0.1,
            r"--eval_fraction=0.1: 11 tokens hold 1 whole .*, and 1 of all 1 are held out: none is",
        ),
        ([[1]], 1, 0, "--data: 1 tokens hold 0 whole sequences"),
        ([range(11)], 10, 1, "--eval_fraction=1: is not in 0 <= fraction < 1"),
        ([range(11)], 10, -0.5, "--eval_fraction=-0.5: is not in 0 <= fraction < 1"),
        ([range(11)], 10, math.nan, "--eval_fraction=nan: is not in"),
        ([[1]] * 9, 4, 0, "that the 2 sequences to train on would predict is the first of a doc"),
        ([[1] * 5, [1]], 4, 0.5, "that the 1 sequences held out would predict is the first of a"),
    ],
    ids=[
        "short",
        "none-left",
        "one-token",
        "all",
        "negative",
        "nan",
        "no-target-to-train-on",
        "no-target-held-out",
    ],
)
def test_data_that_are_too_few(tmp_path, contents, seq_len, fraction, message):
    data = opened(*written(tmp_path, contents), vocab_size=100)
    with pytest.raises(ValueError, match=message):
        batches.split(data, seq_len, fraction)


def test_one_whole_sequence_is_enough(tmp_path):
    data = opened(*written(tmp_path, [range(11)]), vocab_size=100)
    assert len(batches.split(data, 10, 0)[0]) == 1
    assert [len(part) for part in batches.split(data, 5, 0.1)] == [1, 1]


############################################ Training ############################################


@pytest.mark.parametrize("batch", [1, 7, 101, 250], ids=str)
def test_every_sequence_comes_once_an_epoch(corpus, batch):
    """Also where a batch holds several epochs, and where epochs share one."""
    sequences = batches.Sequences(corpus, 10)
    dataset = batches.training(sequences, 3, batch, np.arange(batch))
    order = []
    while len(order) < 3 * 101:
        order += positions(dataset[len(order) // batch])
    epochs = [order[i * 101 : (i + 1) * 101] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(101))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert list(range(101)) not in epochs


def test_orders_of_few_sequences_are_permutations(tmp_path):
    for n in (1, 2, 3, 5, 8, 13):
        data = opened(*written(tmp_path, [range(n + 1)]), vocab_size=100)
        dataset = batches.training(batches.Sequences(data, 1), 0, n, np.arange(n))
        orders = [tuple(dataset[c]["tokens"][:, 0].tolist()) for c in range(5)]
        assert all(sorted(order) == list(range(n)) for order in orders)
        assert n < 3 or len(set(orders)) > 1


def test_a_batch_is_a_function_of_seed_and_call(corpus):
    def made(seed, call):
        sequences = batches.Sequences(corpus, 10)
        return tuple(positions(batches.training(sequences, seed, 8, np.arange(8))[call]))

    # Call 101 * k is the start of an epoch: seeds must not be epochs of each other.
    keys = [(seed, call) for seed in (0, 1, 2, 2**32 - 1) for call in (0, 1, 101, 202)]
    first = {key: made(*key) for key in keys}
    assert len(set(first.values())) == len(keys)
    assert {key: made(*key) for key in reversed(keys)} == first


@pytest.mark.parametrize("rows", [[0, 1], [7, 3, 3], [], range(8)], ids=str)
def test_some_rows_of_a_batch_are_those_rows(corpus, rows):
    sequences, rows = batches.Sequences(corpus, 10), np.asarray(rows, int)
    for dataset, every in (
        [batches.training(sequences, 0, 8, r) for r in (rows, np.arange(8))],
        [batches.evaluation(sequences, 8, r) for r in (rows, np.arange(8))],
    ):
        for call in (0, 12):
            some, whole = dataset[call], every[call]
            assert some["tokens"].shape == (len(rows), 11)
            assert some["mask"].shape == (len(rows), 10)
            for name in ("tokens", "mask"):
                np.testing.assert_array_equal(some[name], whole[name][rows])
                assert some[name].dtype == whole[name].dtype


def test_what_cannot_be_trained_on(corpus):
    with pytest.raises(ValueError, match="training: there is no sequence"):
        batches.training(batches.Sequences(corpus, 10, 5, 5), 0, 8, np.arange(8))
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"--seed={seed}: is not in 0 <= seed < 2\^32"):
            batches.training(batches.Sequences(corpus, 10), seed, 8, np.arange(8))


########################################### Evaluation ###########################################


def test_an_evaluation_is_every_sequence_once_in_order(corpus):
    held_out = batches.Sequences(corpus, 10, first=81)  # 20, the last of 2 targets
    dataset = batches.evaluation(held_out, 8, np.arange(8))
    assert len(dataset) == 3
    elements = [dataset[c] for c in range(3)]
    assert [p for element in elements for p in positions(element)][:20] == list(range(81, 101))
    assert not elements[2]["mask"][4:].any()
    assert not elements[2]["tokens"][4:].any()
    assert sum(int(element["mask"].sum()) for element in elements) == 19 * 10 + 2


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [(1, [1]), (2, [1, 51]), (4, [1, 26, 51, 76]), (100, range(1, 101)), (999, range(1, 101))],
    ids=str,
)
def test_a_limited_evaluation_is_spread_evenly(corpus, limit, chosen):
    held_out = batches.Sequences(corpus, 10, first=1)
    dataset = batches.evaluation(held_out, 3, np.arange(3), limit)
    got = [dataset[c] for c in range(len(dataset))]
    rows = [p for b in got for p, mask in zip(positions(b), b["mask"], strict=True) if mask.any()]
    assert rows == list(chosen)
    assert len(got) == math.ceil(len(rows) / 3)
