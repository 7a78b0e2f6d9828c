"""Arrays in a directory, written and read by Orbax: no more of it, and none of its words.

Orbax is imported at the first call, as that takes a second.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

# A write has no deadline: in one process none waits for it, and several are watched by heartbeats.
_WRITE_SECONDS = 7 * 24 * 3600
# Errors of a disk that come as text, from native code.
_DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM,
    errno.ESTALE, errno.ENOENT,
)  # fmt: skip


class Writer:
    """Writes arrays in the background, one list at a time, into a directory of their own.

    Args:
      finish: called in the background when all arrays are written and before the directory gets
        its name; in process 0 alone.
    """

    def __init__(self, finish: Callable[[], None]):
        import orbax.checkpoint as ocp

        if not isinstance(sys.unraisablehook, _Listening):
            sys.unraisablehook = _Listening(sys.unraisablehook)  # for good: some come late
        self._checkpointer = ocp.AsyncCheckpointer(
            _handler(),
            async_options=ocp.AsyncOptions(
                timeout_secs=_WRITE_SECONDS,
                post_finalization_callback=finish,
                # So that a directory that cannot be made is an error of `start` itself.
                create_directories_asynchronously=False,
            ),
        )

    def start(self, path: str, arrays: Sequence[jax.Array]) -> None:
        """Begin to write; return once the arrays may be donated."""
        import orbax.checkpoint as ocp

        # Orbax takes none without elements; `read` makes these.
        named = {_name(i): x for i, x in enumerate(arrays) if x.size}
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(named))

    def wait(self) -> None:
        """Return when all is written; raise what went wrong."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """End all threads; what goes wrong now, nobody waits for."""
        with contextlib.suppress(Exception):
            self._checkpointer.close()


def read(path: str, wanted: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return arrays that were written, in their order, each with the sharding wanted of it.

    Raises:
      Exception: of any kind, where files are missing or garbled.
    """
    import orbax.checkpoint as ocp

    full = {_name(i): x for i, x in enumerate(wanted) if x.size}
    args = {
        name: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
        for name, x in full.items()
    }
    with ocp.Checkpointer(_handler()) as checkpointer:
        asked = ocp.args.PyTreeRestore(full, restore_args=args)
        found = checkpointer.restore(path, args=asked)
    return [found[_name(i)] if x.size else _empty(x) for i, x in enumerate(wanted)]


def reason(error: BaseException) -> str:
    """Return one line of why: an error of the disk by its name, or else how the text begins."""
    text = " ".join(str(error).split()) or type(error).__name__
    for number in _DISK_ERRORS:
        if os.strerror(number) in text:
            return os.strerror(number)
    return text if len(text) < 200 else f"{text[:200]}..."


def _handler() -> Any:
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(_not_of_orbax)  # what goes wrong is raised, too
    # Floats hardly compress (8 % at random), and packing takes longer than the disk.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _empty(x: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = np.zeros(x.shape, x.dtype)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: zeros[index])


def _name(place: int) -> str:
    return f"{place:05}"


class _Listening:
    """What is said of an error that nobody can catch, but of one kind.

    Once one array could not be written, Orbax closes the event loop of all. TensorStore's threads
    still tell it of the others, and each prints that it is closed. The first error is raised.
    """

    def __init__(self, told: Callable[[Any], object]):
        self._told = told

    def __call__(self, of: Any) -> None:
        in_main = threading.get_ident() == threading.main_thread().ident
        if in_main or str(of.exc_value) != "Event loop is closed":
            self._told(of)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname
