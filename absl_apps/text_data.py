"""Bytes of real text: which files, their entropy, and sequences drawn by seed and step.

Nothing here knows about devices. A batch is a pure function of (data, seed, step), so a run that
stops and one that goes on see the same batches, and the processes of a cluster each make their own
rows of the one batch that all agree on.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence

import numpy as np


def default_pattern() -> str:
    """Return the glob of the text every machine has: Python's own standard library."""
    return os.path.join(glob.escape(sysconfig.get_paths()["stdlib"]), "*.py")


def find_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that the paths and globs name: in the order given, each glob sorted.

    Raises:
      ValueError: if a pattern matches no file; all such patterns are named.
    """
    files: dict[str, None] = {}  # ordered, and a file named twice is read once
    unmatched = []
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        matches = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
        matches = [match for match in matches if os.path.isfile(match)]
        files.update(dict.fromkeys(matches))
        if not matches:
            hint = f" (a directory; try {pattern.rstrip('/')}/**/*.txt)"
            unmatched.append(pattern + (hint if os.path.isdir(path) else ""))
    if unmatched or not patterns:
        raise ValueError(f"--data: no file matches {', '.join(unmatched) or 'an empty list'}.")
    return list(files)


def load(files: Sequence[str], limit: int) -> np.ndarray:
    """Return the first `limit` bytes of the files put end to end, as uint8 `[N]`.

    Raises:
      ValueError: if there is not a single byte in them.
    """
    chunks, left = [], limit
    for file in files:
        if left == 0:
            break
        with open(file, "rb") as stream:
            chunks.append(stream.read(left))
        left -= len(chunks[-1])
    data = np.frombuffer(b"".join(chunks), np.uint8)
    if data.size == 0:
        raise ValueError(f"--data: no byte in {files[0]}, nor in any of the {len(files)} matches.")
    return data


def check_length(data: np.ndarray, seq_len: int) -> None:
    """Raise ValueError unless the data holds one sequence and the byte after it."""
    if data.size < seq_len + 1:
        raise ValueError(
            f"--data: {data.size} bytes are fewer than seq_len + 1 = {seq_len} + 1 = "
            f"{seq_len + 1}; give more text, or a smaller --seq_len."
        )


def checksum(data: np.ndarray) -> str:
    """Return a text that tells data from other data: their SHA-256, shortened."""
    return hashlib.sha256(data).hexdigest()[:16]


def unigram_entropy(data: np.ndarray) -> float:
    """Return -sum_b p(b) log p(b) in nats: the best loss of a model that ignores context."""
    counts = np.bincount(data, minlength=256)
    p = counts[counts > 0] / data.size
    return float(-np.sum(p * np.log(p)))


def sample(
    data: np.ndarray,
    seed: int,
    step: int,
    batch: int,
    length: int,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """Return sequences drawn by (seed, step), uint8 `[batch, length]`.

    Args:
      data: uint8 `[N]`.
      seed: of the run.
      step: whose batch this is.
      batch: sequences of all processes.
      length: bytes of a sequence.
      rows: the sequences of the batch to return, int `[r]`; None: all. What they hold does not
        depend on it.
    """
    last = data.size - length
    starts = np.random.default_rng((seed, step)).integers(0, last, size=batch, endpoint=True)
    if rows is not None:
        starts = starts[rows]
    return data[starts[:, None] + np.arange(length)]
