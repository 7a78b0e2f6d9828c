"""SIGTERM and ctrl-C: heard at once, heeded between two calls of the step, by all processes.

A scheduler that needs its machine sends SIGTERM, and SIGKILL some time after it. Where processes
are many, JAX tells all of them of a notice to one, and at which call all are to stop.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils


def exit_code(name: str) -> int:
    """Return 0 for SIGTERM, so that a scheduler sees success, and 130 for SIGINT."""
    return 0 if name == "SIGTERM" else 128 + signal.SIGINT


class Signals:
    """Hears SIGTERM and SIGINT from its `with` on.

    Until `heeded`, a signal ends the process at once, and so does a second ctrl-C, whatever is
    being written: that is never seen half done. No exception is raised, as it would come out where
    nobody catches it: in a callback of the garbage collector, or of the compiler, which crashes.
    Of several processes JAX hears SIGTERM itself, from `jax.distributed.initialize` on, and it is
    heeded after the first call.
    """

    def __init__(self) -> None:
        self.heard: str | None = None
        self._heeds = False
        self._before: dict[int, object] = {}
        self._many = jax.distributed.is_initialized()

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT,) if self._many else (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def heeded(self) -> None:
        """From now on `asked` is called after every call of the step."""
        self._heeds = True

    def asked(self, calls: int) -> str | None:
        """Return the signal to stop for now, if there is one; all processes stop at the same call.

        Args:
          calls: taken so far; one more than when this was last called.
        """
        if self._many:
            stop = multihost_utils.reached_preemption_sync_point(calls)
            return self.heard or "SIGTERM" if stop else None
        return self.heard

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        if self.heard == "SIGINT" == name:
            _end(name, "SIGINT again: stopped at once; what was saved is kept.")
        self.heard = name
        if self._many:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX hears, and tells the others
        elif not self._heeds:
            _end(name, f"{name} before the first step of this start; nothing new to save.")


def _end(name: str, text: str) -> None:
    os.write(1, f"train: {text}\n".encode())  # print may be what was interrupted
    os._exit(exit_code(name))
