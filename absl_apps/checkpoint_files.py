"""The files of a checkpoint: listed when it is whole, and compared with the list before it is read.

Files up to 1 MiB are listed with their SHA-256. Larger ones hold arrays, which are compared by
their fingerprints once they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re

LIST = "files.json"
# Orbax writes these last, after the list. Nothing of the run is in them.
_UNLISTED = {"_CHECKPOINT_METADATA", "commit_success.txt"}

_HASHED = 2**20  # bytes
_HALF_WRITTEN = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|removed)")


def calls_in(directory: str) -> list[int]:
    """Return the calls that a checkpoint is named after, ascending, whole or not.

    Raises:
      OSError: if the directory cannot be listed; one that is not there has none.
    """
    return sorted(int(name) for name in _names(directory) if re.fullmatch(r"0|[1-9]\d*", name))


def half_written_in(directory: str) -> list[str]:
    """Return the paths of what processes that were killed left of a checkpoint."""
    found = [name for name in _names(directory) if _HALF_WRITTEN.fullmatch(name)]
    return [os.path.join(directory, name) for name in sorted(found)]


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def write(path: str, contents: str) -> None:
    """Write a new file, onto the disk."""
    with open(path, "x", encoding="utf-8") as stream:
        stream.write(contents)
        stream.flush()
        os.fsync(stream.fileno())


def seal(directory: str) -> None:
    """Write the list of the files that are in a directory."""
    files = {name: _described(os.path.join(directory, name)) for name in _walk(directory)}
    write(os.path.join(directory, LIST), _with_digest(files))


def broken(directory: str) -> str | None:
    """Return what is wrong with the files of a directory that was sealed, or None."""
    if not os.path.isdir(directory):
        return "is not a directory"
    try:
        with open(os.path.join(directory, LIST), "rb") as stream:
            text = stream.read()
    except OSError as error:
        return _why(LIST, error)
    try:
        files = json.loads(text)["files"]
        if _with_digest(files).encode() != text:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        return f"{LIST} is garbled"
    for name in sorted({*files, *_UNLISTED}):
        try:
            size, digest = _described(os.path.join(directory, name))
        except OSError as error:
            return _why(name, error)
        if name in _UNLISTED:
            continue
        if size != files[name][0]:
            return f"{name} has {size:,} of {files[name][0]:,} bytes"
        if digest != files[name][1]:
            return f"{name} is garbled"
    return None


def _why(name: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    return f"{name}: {error.strerror or error}"


def _walk(directory: str) -> list[str]:
    found = []
    for where, _, names in os.walk(directory):
        found += [os.path.relpath(os.path.join(where, name), directory) for name in names]
    return sorted(set(found) - _UNLISTED)


def _described(path: str) -> list[int | str | None]:
    size = os.stat(path).st_size
    if size > _HASHED:
        return [size, None]
    with open(path, "rb") as stream:
        return [size, hashlib.sha256(stream.read()).hexdigest()]


def _with_digest(files: dict[str, list[int | str | None]]) -> str:
    """Returns the list as text that no changed bit survives."""
    listed = json.dumps(files, sort_keys=True)
    return json.dumps(
        {"sha256": hashlib.sha256(listed.encode()).hexdigest(), "files": files}, sort_keys=True
    )
