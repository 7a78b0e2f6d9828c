"""A corpus as sequences, and sequences as shuffled batches that are made ahead: Grain's part.

Batch c is a pure function of (sequences, seed, c), so the position in the data is one number, a run
that stops and one that goes on see the same batches, and the processes of a cluster each make their
own rows of the one batch that all agree on.
"""

from __future__ import annotations

import contextlib
import fractions
import logging
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging as absl_logging

from absl_apps.corpus import Corpus

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]

_THREADS = 2  # reading is a copy: more only wait for each other
_AHEAD = 8  # batches


########################################### Sequences ############################################


class Sequences:
    """The corpus cut into sequences: a Grain random-access source.

    Documents lie end to end, and sequence i is tokens [i T, i T + T + 1) of the corpus, T being
    `seq_len`: its last token is the first of the next, where it is an input. So every token but
    the corpus's first is a target once, and a document that does not fit goes on in the next
    sequence. The mask is False where the target begins a document, since what came before says
    nothing of it, and where there is no target: the last sequence is padded with token 0.
    Attention does reach back over a document's beginning.

    Args:
      corpus: at least one token.
      seq_len: T, the targets of a sequence.
      first, last: which sequences of the corpus these are: first to last - 1. None: to the end.
    """

    def __init__(self, corpus: Corpus, seq_len: int, first: int = 0, last: int | None = None):
        count = -(-(corpus.size - 1) // seq_len)
        self.corpus = corpus
        self.seq_len = seq_len
        self.first = first
        self.last = count if last is None else last
        if not 0 <= self.first <= self.last <= count:
            raise ValueError(f"Sequences: {first}:{last} of {count} sequences.")

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> Batch:
        """Return {"tokens": `[T + 1]` of the corpus's dtype, "mask": bool `[T]`}."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        tokens = np.zeros(self.seq_len + 1, self.corpus.dtype)
        begins = np.ones(self.seq_len + 1, bool)
        start = (self.first + index) * self.seq_len
        stop = min(start + self.seq_len + 1, self.corpus.size)
        tokens[: stop - start], begins[: stop - start] = self.corpus.read(start, stop)
        return {"tokens": tokens, "mask": ~begins[1:]}


def split(corpus: Corpus, seq_len: int, eval_fraction: float) -> tuple[Sequences, Sequences | None]:
    """Return the sequences to train on, and the last ceil(eval_fraction * all), held out.

    Args:
      corpus: the data.
      seq_len: targets of a sequence.
      eval_fraction: of the sequences, from 0 (none is held out: None) to below 1.

    Raises:
      ValueError: if there is not one whole sequence to train on, or a part has no target: all of
        its tokens begin documents.
    """
    if not 0 <= eval_fraction < 1:
        raise ValueError(f"--eval_fraction={eval_fraction:g}: is not in 0 <= fraction < 1.")
    every = Sequences(corpus, seq_len)
    # As it is written: 0.07 * 100 is above 7 in binary.
    held = math.ceil(fractions.Fraction(str(eval_fraction)) * len(every))
    whole = (corpus.size - 1) // seq_len
    said = f"{corpus.size:,} tokens hold {whole:,} whole sequences of --seq_len={seq_len} + 1"
    if whole == 0:
        raise ValueError(f"--data: {said}; give more data, or a smaller --seq_len.")
    train = Sequences(corpus, seq_len, last=len(every) - held)
    if len(train) == 0:
        raise ValueError(
            f"--eval_fraction={eval_fraction:g}: {said}, and {held} of all {len(every)} are held "
            "out: none is left to train on; give more data, a smaller --seq_len, or 0."
        )
    held_out = Sequences(corpus, seq_len, first=len(train)) if held else None
    for part, what in (train, "to train on"), (held_out, "held out"):
        if part is not None and not any(part[i]["mask"].any() for i in range(len(part))):
            raise ValueError(
                f"--data: each token that the {len(part):,} sequences {what} would predict is the "
                "first of a document; give longer documents."
            )
    return train, held_out


############################################ Batches #############################################


def training(
    sequences: Sequences, seed: int, batch: int, rows: np.ndarray
) -> grain.MapDataset[Batch]:
    """Return the batches of a run without end: epochs, each a permutation of its own.

    Every sequence comes once an epoch. Epochs follow each other without a gap: a batch may hold
    the last of one and the first of the next, or, where it is larger than the data, several whole
    ones.

    Args:
      sequences: to train on, at least one.
      seed: of the permutations, below 2^32.
      batch: sequences of all processes.
      rows: those of them to make, int `[r]`; what they hold does not depend on it.

    Returns:
      A dataset whose element c is {"tokens": `[r, T + 1]`, "mask": bool `[r, T]`}.

    Raises:
      ValueError: if there is no sequence, or the seed is not in its range.

    Cost: 15 microseconds a sequence; below 1,000 sequences, 15 milliseconds an epoch, since
    Grain's shuffle walks over 2^16 places.
    """
    if len(sequences) == 0:
        raise ValueError("training: there is no sequence.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed={seed}: is not in 0 <= seed < 2^32.")
    dataset = _grain().MapDataset
    order = dataset.range(len(sequences)).seed(seed).shuffle().repeat()
    order[0]  # what Grain sets up at the first use is not for threads to race for
    return dataset.range(len(order) // batch).map(
        lambda c: _stack(sequences, rows, lambda row: order[c * batch + row])
    )


def evaluation(
    sequences: Sequences, batch: int, rows: np.ndarray, limit: int | None = None
) -> grain.MapDataset[Batch]:
    """Return the batches of one evaluation, in order: every sequence once.

    Args:
      sequences: held out.
      batch: sequences of all processes.
      rows: those of them to make, int `[r]`.
      limit: sequences at most, evenly spread over all. None: all.

    Returns:
      A dataset of ceil(n / batch) elements as `training`'s; the last is filled up with rows of
      mask False.
    """
    n = len(sequences) if limit is None else min(limit, len(sequences))

    def chosen(position: int) -> int | None:
        return position * len(sequences) // n if position < n else None

    return (
        _grain()
        .MapDataset.range(-(-n // batch))
        .map(lambda c: _stack(sequences, rows, lambda row: chosen(c * batch + row)))
    )


def _stack(sequences: Sequences, rows: np.ndarray, at: Callable[[int], int | None]) -> Batch:
    """Returns the rows of a batch; one whose sequence is None is masked."""
    tokens = np.zeros((len(rows), sequences.seq_len + 1), sequences.corpus.dtype)
    mask = np.zeros((len(rows), sequences.seq_len), bool)
    for i, row in enumerate(rows):
        index = at(int(row))
        if index is not None:
            element = sequences[index]
            tokens[i], mask[i] = element["tokens"], element["mask"]
    return {"tokens": tokens, "mask": mask}


def iterate(dataset: grain.MapDataset[Any], start: int = 0) -> Iterator[Any]:
    """Return the elements from `start` on, made ahead in threads; `close()` ends these.

    An error in a thread is raised where its element would have been returned, and ends the
    iterator.

    Args:
      dataset: of `training` or `evaluation`.
      start: the first element.

    Raises:
      ValueError: if the dataset is shorter than `start`.
    """
    if not 0 <= start <= len(dataset):
        raise ValueError(f"iterate: element {start} of {len(dataset)}.")
    grain = _grain()
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
    elements = iter(dataset.to_iter_dataset(options))
    grain.experimental.set_next_index(elements, start)

    def closing() -> Iterator[Any]:
        # Grain's iterator would go on after an error, one element off.
        with contextlib.closing(elements):
            yield from elements

    return closing()


def _grain() -> Any:
    """Imports Grain when there is data to read, for it takes long, and defines flags.

    Beside an old jaxlib it warns that its worker processes, of which there are none here, cannot
    be profiled.
    """
    if "grain" not in sys.modules:
        logger = absl_logging.get_absl_logger()
        logger.addFilter(_is_of_use)
        try:
            import grain  # noqa: F401
        finally:
            logger.removeFilter(_is_of_use)
    return sys.modules["grain"]


def _is_of_use(record: logging.LogRecord) -> bool:
    return "multiprocess worker profiling" not in record.getMessage()
