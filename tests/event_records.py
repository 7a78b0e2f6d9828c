"""Reads what a run leaves back: its metrics, and its TensorBoard events as TensorBoard does."""

import json
import struct

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c


def records(path):
    """Returns the events of a file, each checked, to its last byte."""
    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = data[12 : 12 + length]
        assert len(event) == length
        checks = struct.unpack("<I", data[8:12]) + struct.unpack("<I", data[12 + length :][:4])
        assert checks == (masked_crc32c(data[:8]), masked_crc32c(event))
        events.append(Event.FromString(event))
        data = data[16 + length :]
    return events


def shown(directory):
    """Returns (tag, step, value) of all points that TensorBoard shows, in order."""
    points = []
    for path in sorted((directory / "tensorboard").iterdir()):
        assert path.name.startswith("events.out.tfevents.")
        first, *others = records(path)
        assert first.file_version == "brain.Event:2"
        for event in others:
            if event.session_log.status == SessionLog.START:
                points = [point for point in points if point[1] < event.step]
            points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return points


def lines_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
