"""Text and token files as one long array of tokens, and where its documents begin.

Nothing here knows about devices, nor imports JAX. Files are mapped, or read where they are small:
what they hold is checked once, at the start, so that a run does not meet it after days.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from absl_apps import data_files
from absl_apps.data_files import default_pattern as default_pattern
from absl_apps.data_files import find_files as find_files

_SMALL = 1 << 20  # bytes; smaller files are read, not mapped,
_RESIDENT = 1 << 30  # up to so many bytes in all
_MAPPED = 256  # files mapped at a time: each takes a file descriptor, of often only 1,024
_BLOCK = 1 << 16  # tokens of a sample's blocks


############################################ Opening #############################################


class _Part(NamedTuple):
    file: str
    size: int  # tokens used of it
    resident: np.ndarray | None  # the tokens of a file that was read


def open_corpus(
    files: Sequence[str],
    *,
    flag: str = "--data",
    max_bytes: int | None,
    vocab_size: int | None,
    document_end: int | None,
) -> Corpus:
    """Return the tokens of the files, put end to end.

    Files that all end in `.bin` are token files: uint16, little endian, without a header, as
    nanoGPT's prepare.py writes them. All others are text, whose tokens are its bytes.

    Args:
      files: of one kind. Those that lie beyond `max_bytes` are not looked at.
      flag: that named them, for the messages.
      max_bytes: to use at most, of all files from the start, cut to whole tokens. None: all.
      vocab_size: of a token file's tokenizer.
      document_end: the token of a token file that ends a document; nanoGPT's is 50256. None: each
        file is one document, as text files are.

    Raises:
      ValueError: if files are not what their names say, cannot be read or hold nothing. Bad files
        are named together, three at most.

    Cost: one pass over the bytes used; memory for the files below 1 MiB, up to 1 GiB of them.
    """
    dtype = data_files.kind(files, flag, vocab_size, document_end)
    vocab_size = vocab_size or 256
    parts, bad = [], []
    left = math.inf if max_bytes is None else max_bytes
    resident = 0
    for file in files:
        if left < dtype.itemsize:
            break
        try:
            size = data_files.size(file, dtype)
            used = int(min(size, left))
            count = used // dtype.itemsize
            left -= used
            if count == 0:
                continue
            read = used < _SMALL and resident + used <= _RESIDENT
            tokens = _tokens(file, dtype, count, read)
            data_files.check_tokens(tokens, file, vocab_size)
        except OSError as error:
            bad.append(f"{file}: {error.strerror or error}")
        except ValueError as error:
            bad.append(f"{file}: {error}")
        else:
            resident += used if read else 0
            parts.append(_Part(file, count, tokens if read else None))
    if bad:
        more = f"; and {len(bad) - 3:,} more of {len(files):,} files" if len(bad) > 3 else ""
        raise ValueError(f"{flag}: {'; '.join(bad[:3])}{more}.")
    if not parts:
        where = "" if max_bytes is None else f"the first {max_bytes:,} bytes of "
        unit = "byte" if dtype == data_files.BYTE else "token"
        raise ValueError(f"{flag}: no {unit} in {where}{data_files.first(files)}.")
    return Corpus(parts, dtype, vocab_size, document_end)


def _tokens(file: str, dtype: np.dtype, count: int, read: bool) -> np.ndarray:
    """Returns the first tokens of a file, read or mapped: `[count]`."""
    if read:
        tokens = np.fromfile(file, dtype, count)
        if tokens.size < count:
            raise ValueError(f"ended after {tokens.size:,} of {count:,} tokens: it has changed")
        return tokens
    # As an ndarray: what np.memmap adds to one makes each of its slices slow.
    return np.asarray(np.memmap(file, dtype, "r", shape=(count,)))


########################################## The corpus ############################################


class Corpus:
    """Tokens of files put end to end, `[size]`, which are divided into documents.

    Attributes:
      dtype: uint8 of text, uint16 of token files.
      size: tokens.
      files: that hold them, in order.
      vocab_size: above every token.
      document_end: the token that ends a document, or None.
    """

    def __init__(
        self, parts: Sequence[_Part], dtype: np.dtype, vocab_size: int, document_end: int | None
    ):
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.document_end = document_end
        self.files = tuple(part.file for part in parts)
        self._parts = parts
        self._ends = list(itertools.accumulate(part.size for part in parts))
        self.size = self._ends[-1]
        # Each maps again what it has let go of; threads may do so at once, to no harm.
        self._map = functools.lru_cache(maxsize=_MAPPED)(
            lambda i: _tokens(parts[i].file, dtype, parts[i].size, read=False)
        )

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens start to stop - 1, `[n]`, and whether each begins a document, bool `[n]`.

        The first token of a file does, and the one after a `document_end`.
        """
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"tokens {start}:{stop} of {self.size}")
        before = int(start > 0)  # one more, which may be the document's end
        tokens, begins = self._copy(start - before, stop)
        if self.document_end is not None:
            begins[1:] |= tokens[:-1] == self.document_end
        return tokens[before:], begins[before:]

    def _copy(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens, and which of them are the first of a file."""
        tokens = np.empty(stop - start, self.dtype)
        begins = np.zeros(stop - start, bool)
        at, i = start, bisect.bisect_right(self._ends, start)
        while at < stop:
            first = self._ends[i] - self._parts[i].size
            held = self._parts[i].resident
            part = (self._map(i) if held is None else held)[at - first : stop - first]
            tokens[at - start : at - start + part.size] = part
            begins[at - start] |= at == first
            at, i = at + part.size, i + 1
        return tokens, begins

    def fingerprint(self) -> str:
        """Return 16 hex digits that tell this data from other data; names do not matter.

        Of more than 64 MiB, evenly spaced blocks of that many bytes are looked at: other sizes and
        an edit that shifts what follows are seen, single bytes changed in place may not be.
        """
        digest = hashlib.sha256(
            repr((str(self.dtype), self.vocab_size, self.document_end)).encode()
        )
        digest.update(np.asarray([part.size for part in self._parts], "<i8").tobytes())
        for block in self._blocks((64 << 20) // self.dtype.itemsize):
            digest.update(block.tobytes())
        return digest.hexdigest()[:16]

    def unigram_entropy(self) -> float:
        """Return -sum_t p(t) log p(t) in nats a token: the best loss without context.

        Estimated from 2^24 tokens, evenly spread, where there are more.
        """
        counts = np.zeros(1, np.int64)
        for block in self._blocks(1 << 24):
            new = np.bincount(block, minlength=counts.size)
            new[: counts.size] += counts
            counts = new
        p = counts[counts > 0] / counts.sum()
        return float(-np.sum(p * np.log(p)))

    def _blocks(self, most: int) -> Iterator[np.ndarray]:
        """Yields all tokens, or blocks of `most` in all from the first to the last of them."""
        starts: Sequence[int] = range(0, self.size, _BLOCK)
        if self.size > most:
            count, last = most // _BLOCK, self.size - _BLOCK
            starts = [last * i // (count - 1) for i in range(count)]
        for start in starts:
            yield self._copy(start, min(start + _BLOCK, self.size))[0]
