"""Data files: which ones are named, and whether they are the text or the tokens they pass for."""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Sequence

import numpy as np

BYTE = np.dtype(np.uint8)
TOKEN = np.dtype("<u2")

# The headers of llm.c's token files, 256 int32: without them the tokens are those of nanoGPT.
_HEADERS = {
    20240520: "begins with llm.c's header of 1,024 bytes, which are no tokens; "
    "tail -c +1025 {file} > OUT.bin leaves it out",
    20240801: "begins with llm.c's header of uint32 tokens; only uint16 tokens are read",
}

_CHUNK = 1 << 24  # tokens checked at a time


def default_pattern() -> str:
    """Return the glob of the text every machine has: Python's own standard library."""
    return os.path.join(glob.escape(sysconfig.get_paths()["stdlib"]), "*.py")


def find_files(patterns: Sequence[str], flag: str = "--data") -> list[str]:
    """Return the files that the paths and globs name: in the order given, each glob sorted.

    Args:
      patterns: paths and globs; `**` descends.
      flag: whose they are, for the message.

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
            hint = " (no regular file)" if os.path.exists(path) else ""
            if os.path.isdir(path):
                hint = f" (a directory; try {pattern.rstrip('/')}/**/*.txt)"
            unmatched.append(pattern + hint)
    if unmatched or not patterns:
        raise ValueError(f"{flag}: no file matches {', '.join(unmatched) or 'an empty list'}.")
    return list(files)


def kind(
    files: Sequence[str], flag: str, vocab_size: int | None, document_end: int | None
) -> np.dtype:
    """Return the dtype of the files' tokens; raise ValueError where what is said contradicts."""
    if not files:
        raise ValueError(f"{flag}: no file is named.")
    tokens = [file for file in files if file.endswith(".bin")]
    text = [file for file in files if not file.endswith(".bin")]
    if tokens and text:
        raise ValueError(
            f"{flag}: token files and text cannot be mixed: {first(tokens)}, but {first(text)}."
        )
    if text:
        for name, value, why in (
            ("vocab_size", vocab_size, "whose vocabulary is the 256 bytes"),
            ("document_end", document_end, "of which each file is one document"),
        ):
            if value is not None:
                raise ValueError(
                    f"--{name}={value}: {first(text)} is text, {why}; leave it out, or give "
                    "token files (.bin)."
                )
        return BYTE
    if vocab_size is None:
        raise ValueError(
            f"--vocab_size: {first(tokens)} holds tokens, and not the size of their vocabulary; "
            "give it: 50257 for GPT-2's tokenizer."
        )
    if vocab_size < 1:
        raise ValueError(f"--vocab_size={vocab_size}: is not at least 1.")
    if document_end is not None and not 0 <= document_end < vocab_size:
        raise ValueError(
            f"--document_end={document_end}: is none of the tokens 0 to {vocab_size - 1} of "
            f"--vocab_size={vocab_size}."
        )
    return TOKEN


def first(files: Sequence[str]) -> str:
    """Return the name of the first file, and how many follow it."""
    return files[0] + (f" (and {len(files) - 1:,} more)" if len(files) > 1 else "")


def size(file: str, dtype: np.dtype) -> int:
    """Return the bytes of a file; raise ValueError or OSError where it holds no such tokens."""
    status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        what = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise ValueError(f"is {what}")
    with open(file, "rb") as stream:  # whether it may be read
        magic = int.from_bytes(stream.read(4), "little")
    if dtype == TOKEN and magic in _HEADERS:
        raise ValueError(_HEADERS[magic].format(file=file))
    if status.st_size % dtype.itemsize:
        raise ValueError(f"has {status.st_size:,} bytes, an odd number, but its tokens are uint16")
    return status.st_size


def check_tokens(tokens: np.ndarray, file: str, vocab_size: int) -> None:
    """Raise ValueError at the first token that is none."""
    for start in range(0, tokens.size, _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        if chunk.dtype == BYTE and chunk.min() == 0:
            raise ValueError(
                f"byte {start + int(chunk.argmin()):,} (from 0) is NUL, so it is binary or UTF-16, "
                "not text"
            )
        if chunk.dtype == TOKEN and (largest := int(chunk.max())) >= vocab_size:
            at = int(np.argmax(chunk >= vocab_size))
            raise ValueError(
                f"token {start + at:,} (from 0) is {chunk[at]}, not below "
                f"--vocab_size={vocab_size} (the largest near it: {largest}): is no file of "
                "uint16 tokens of that vocabulary"
            )
