"""Files that are never seen half written: one that grows by pieces, one replaced in one move."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


class GrowingFile:
    """A file that grows by whole pieces, each in one write, seen by readers at once.

    It is opened for each piece, so that an error of the disk is met by who writes the piece, and
    that closing has nothing left to do.

    Args:
      path: of the file, made at the first piece if missing.
    """

    def __init__(self, path: str):
        self.path = path

    def append(self, piece: bytes) -> None:
        """Append a piece. Where that fails, what was written of it is cut off again.

        Raises:
          OSError: of the disk.
        """
        with self._opened() as file:
            before = os.fstat(file).st_size
            try:
                while piece:  # a disk that fills up takes a part, and fails at the next
                    piece = piece[os.write(file, piece) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, before)
                raise

    def sync(self) -> int:
        """Return the length in bytes, once it is all on the disk."""
        with self._opened() as file:
            os.fsync(file)
            size = os.fstat(file).st_size
        sync_directory(os.path.dirname(self.path) or ".")
        return size

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        with naming(self.path):
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                yield file
            finally:
                os.close(file)


def replace(path: str, contents: bytes) -> None:
    """Replace a file in one move; on the disk before its name is, so that no crash empties it.

    Raises:
      OSError: of the disk; the file is then as it was.
    """
    partial = path + ".partial"
    try:
        with naming(partial), open(partial, "wb", buffering=0) as stream:
            while contents:
                contents = contents[stream.write(contents) :]
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise
    sync_directory(os.path.dirname(path) or ".")


def sync_directory(path: str) -> None:
    """Put the names in a directory on the disk, where the file system knows how."""
    with contextlib.suppress(OSError):
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Name the file in an OSError of a call that was given only its number."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise
