"""What a run leaves in its --workdir: one writer for all of it, which an interrupted run resumes.

`metrics.jsonl`, a line a step; `run.json`, what was run; `tensorboard/`, the same numbers;
`loss.png`, a chart of them; `checkpoints/` and `profile/`, which others write.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import math
import os
import socket
from collections.abc import Callable, Collection, Mapping
from typing import Any

from absl_apps import whole_writes
from absl_apps.event_file import EventFile

METRICS, RUN, LOCK, CHART = "metrics.jsonl", "run.json", "run.lock", "loss.png"
TENSORBOARD, CHECKPOINTS, PROFILE = "tensorboard", "checkpoints", "profile"

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_TAIL = 1 << 16  # bytes that hold a line of metrics.jsonl, and many more


def _in_one_line(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an error of the disk a ValueError that names the directory and the file."""

    @functools.wraps(method)
    def wrapped(self: RunFiles, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except OSError as error:
            at = f" ({error.filename})" if error.filename else ""
            raise ValueError(
                f"{self.where}: cannot be used: {error.strerror or error}{at}; mend that, and the "
                "same command goes on."
            ) from None

    return wrapped


class RunFiles:
    """The files of one run in one directory, held against other runs until `close`.

    Args:
      workdir: the directory, made if missing.
      writes: False in all processes of a run but one: then nothing is made, held nor written.

    Attributes:
      earlier: what `run.json` says of the run that is to be resumed; None if there is none.

    Raises:
      ValueError: here and in all methods, in one line: if the directory holds anything but a run
        of this program, is held by another process, or cannot be written.
    """

    def __init__(self, workdir: str, writes: bool = True):
        self.workdir, self.writes = workdir, writes
        self.where = f"--workdir={workdir}"
        self.metrics_path = os.path.join(workdir, METRICS)
        self.run_path = os.path.join(workdir, RUN)
        self.chart_path = os.path.join(workdir, CHART)
        self.tensorboard_path = os.path.join(workdir, TENSORBOARD)
        self.checkpoints_path = os.path.join(workdir, CHECKPOINTS)
        self.profile_path = os.path.join(workdir, PROFILE)
        self.earlier: dict[str, Any] | None = None
        self._metrics = whole_writes.GrowingFile(self.metrics_path)
        self._events: EventFile | None = None
        self._lock: int | None = None
        if writes:
            try:
                self._take()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes have the directory. All is written by then: nothing to wait for."""
        if self._lock is not None:
            os.close(self._lock)  # and the lock with it; as the end of the process does
            self._lock = None

    ######################################### The directory ########################################

    @_in_one_line
    def _take(self) -> None:
        if os.path.exists(self.workdir) and not os.path.isdir(self.workdir):
            raise ValueError(f"{self.where}: is a file; name a directory.")
        os.makedirs(self.workdir, exist_ok=True)
        self._read_earlier()  # in what is not ours, not even a lock is made
        self._hold(os.path.join(self.workdir, LOCK))
        self.earlier = self._read_earlier()  # nor does anyone else write it now
        if self.earlier is None:
            open(self.metrics_path, "ab").close()

    def _read_earlier(self) -> dict[str, Any] | None:
        kept = "nothing of it is overwritten; give this run a --workdir of its own."
        try:
            with open(self.run_path, encoding="utf-8") as stream:
                run = json.load(stream)
        except FileNotFoundError:
            paths = self.metrics_path, self.checkpoints_path, self.tensorboard_path
            left = [os.path.basename(path) for path in paths if not _is_empty(path)]
            if left:
                raise ValueError(
                    f"{self.where}: holds {' and '.join(left)} but no {RUN}: is no run of this "
                    f"program, and {kept}"
                ) from None
            return None
        except ValueError as error:
            raise ValueError(
                f"{self.where}: its {RUN} is not JSON ({error}): is no run of this program, and "
                f"{kept}"
            ) from None
        if not isinstance(run, dict) or not isinstance(run.get("flags"), dict):
            raise ValueError(
                f'{self.where}: its {RUN} has no "flags": is no run of this program, and {kept}'
            )
        return run

    def _hold(self, path: str) -> None:
        """Locks the directory; the system lets go of it when this process ends, however it does."""
        self._lock = lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with whole_writes.naming(path):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    holder = os.read(lock, 200).decode(errors="replace").strip()
                    raise ValueError(
                        f"{self.where}: {holder or 'another process'} is at work in it; stop that "
                        "one first, or give this run a --workdir of its own."
                    ) from None
                if error.errno not in _NO_LOCKS:
                    raise
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    ####################################### Resuming a run #########################################

    def check_same(self, flags: Mapping[str, Any], may_differ: Collection[str] = ()) -> None:
        """Raise ValueError unless the earlier run had these flags.

        Args:
          flags: values by name, of JSON.
          may_differ: names of flags that need not be what they were.
        """
        if self.earlier is None:
            return
        there, here = self.earlier["flags"], json.loads(json.dumps(flags))
        differing = [
            f"--{name} is {_told(there, name)} there, {_told(here, name)} here"
            for name in {**there, **here}
            if name not in may_differ and _told(there, name) != _told(here, name)
        ]
        if differing:
            raise ValueError(
                f"{self.where}: holds a run with other flags: {'; '.join(differing)}. Give them as "
                "they were to resume it, or give this run a --workdir of its own."
            )

    @_in_one_line
    def resume(self, offset: int) -> None:
        """Forget the steps after a checkpoint: they are taken again.

        Args:
          offset: the bytes of metrics.jsonl at the checkpoint, which `settle` returned; 0 if the
            run ended before its first.
        """
        if not self.writes:
            return
        last = self._last_line(offset)
        if os.path.exists(self.metrics_path):
            os.truncate(self.metrics_path, offset)
        self._metrics.sync()
        step = 0 if last is None else last["step"] + 1
        self._events = EventFile(self.tensorboard_path, purge_step=step)

    def _last_line(self, offset: int) -> dict[str, Any] | None:
        """Returns the last line before an offset, where a line must end."""
        remedy = "put the file back as it was, or give this run a --workdir of its own."
        exists = os.path.exists(self.metrics_path)
        size = os.path.getsize(self.metrics_path) if exists else 0
        if size < offset:
            found = f"has {size:,} bytes" if exists else "is missing"
            raise ValueError(
                f"{self.where}: {METRICS} {found}; it had {offset:,} at the checkpoint: {remedy}"
            )
        if not offset:
            return None
        with open(self.metrics_path, "rb") as stream:
            stream.seek(max(0, offset - _TAIL))
            tail = stream.read(offset - stream.tell())
        try:
            line = json.loads(tail.splitlines()[-1])
            if tail.endswith(b"\n") and isinstance(line["step"], int):
                return line
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(
            f"{self.where}: {METRICS} has no step's line up to byte {offset:,}, where it ended at "
            f"the checkpoint: {remedy}"
        )

    ########################################### Writing ############################################

    @_in_one_line
    def log(self, step: int, **metrics: float | str | None) -> None:
        """Append a line to metrics.jsonl, and its numbers to TensorBoard's event file.

        A reader sees the line at once, and sees it whole. JSON has no NaN and no infinity: null.
        """
        if not self.writes:
            return
        line = json.dumps(_finite({"step": step, **metrics}), allow_nan=False) + "\n"
        self._metrics.append(line.encode())
        if self._events is None:
            self._events = EventFile(self.tensorboard_path)
        numbers = {tag: x for tag, x in metrics.items() if isinstance(x, float | int)}
        self._events.add(step, numbers)

    @_in_one_line
    def settle(self) -> int:
        """Return the bytes of metrics.jsonl, for a checkpoint, once all of them are on the disk."""
        if not self.writes:
            return 0
        if self._events is not None:
            self._events.sync()
        return self._metrics.sync()

    @_in_one_line
    def describe(self, run: Mapping[str, Any]) -> None:
        """Replace run.json in one move; `"flags"` in it says that it is ours."""
        if self.writes:
            text = json.dumps(_finite(run), indent=1, allow_nan=False) + "\n"
            whole_writes.replace(self.run_path, text.encode())

    @_in_one_line
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, earlier runs' too; half a last one is left out."""
        with open(self.metrics_path, encoding="utf-8") as stream:
            try:
                return [json.loads(line) for line in stream if line.endswith("\n")]
            except ValueError as error:
                raise ValueError(f"{self.where}: {METRICS} is not JSON lines: {error}.") from None

    @_in_one_line
    def chart(self, unigram_entropy: float | None = None) -> None:
        """Draw loss.png from metrics.jsonl.

        Args:
          unigram_entropy: nats a token, the loss of a model of token frequencies alone.
        """
        if self.writes:
            from absl_apps import charts

            charts.draw(self.lines(), self.chart_path, unigram_entropy)


def _is_empty(path: str) -> bool:
    if os.path.isdir(path):
        return not os.listdir(path)
    return not os.path.exists(path) or not os.path.getsize(path)


def _told(flags: Mapping[str, Any], name: str) -> str:
    if name not in flags:
        return "unknown"
    return "not set" if flags[name] is None else json.dumps(flags[name])


def _finite(value: Any) -> Any:
    """Returns a tree of JSON with null for what JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
