"""TensorBoard's event files, written where an error of the disk is heard.

tensorboardX gives the records. Its SummaryWriter writes them on a thread, which ends at the first
error (a full disk); the eleventh `add_scalar` after that waits for it for ever, and so does
`close`. Here the caller writes, a record a step.

References: https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping

from absl_apps.whole_writes import GrowingFile

_PREFIX = "events.out.tfevents."


class EventFile:
    """One more event file of a directory, made at once, read after all that are there.

    Args:
      directory: of the run's event files, made if missing.
      purge_step: of an earlier run's files, TensorBoard shows only the steps before this one.

    Raises:
      OSError: of the disk, here and in all methods.
    """

    def __init__(self, directory: str, purge_step: int | None = None):
        os.makedirs(directory, exist_ok=True)
        # TensorBoard reads them by name. A resumed run's must come last, on any host's clock.
        others = [_stamp(name) + 1 for name in os.listdir(directory)]
        name = f"{_PREFIX}{max([int(time.time()), *others]):010d}.{socket.gethostname()}"
        self._file = GrowingFile(os.path.join(directory, name))
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            from tensorboardX.proto.event_pb2 import SessionLog

            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the values of a step, by tag."""
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=step, summary=Summary(value=values))

    def sync(self) -> None:
        """Return once all is on the disk."""
        self._file.sync()

    def _write(self, **fields: object) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c

        event = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(event))
        check = [struct.pack("<I", masked_crc32c(part)) for part in (length, event)]
        self._file.append(length + check[0] + event + check[1])


def _stamp(name: str) -> int:
    """Returns the seconds in the name of an event file; of another file, 0."""
    digits = name.removeprefix(_PREFIX).partition(".")[0]
    return int(digits) if name.startswith(_PREFIX) and digits.isdecimal() else 0
