"""TensorBoard's event files: their checksums by another's code, and a disk that is full."""

import struct

import pytest
from event_records import shown

from absl_apps.event_file import EventFile
from absl_apps.run_files import RunFiles


def crc32c(data):
    """The checksum, bit by bit: not the code that wrote it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_records_have_the_checksums_that_tensorboard_checks(tmp_path):
    assert crc32c(b"123456789") == 0xE3069283  # as published (RFC 3720's CRC32C)
    file = EventFile(str(tmp_path), purge_step=3)
    file.add(3, {"loss": 1.5})
    (path,) = tmp_path.iterdir()
    data, count = path.read_bytes(), 0
    while data:
        length, check = struct.unpack("<QI", data[:12])
        assert check == masked(data[:8])
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked(data[12:][:length]),)
        data, count = data[16 + length :], count + 1
    assert count == 3  # the version, the purge, the step


def test_without_a_purge_steps_would_be_shown_twice(tmp_path):
    """The control of the tests of resuming: without `resume` they would see it."""
    for _ in range(2):
        with RunFiles(str(tmp_path)) as outputs:
            outputs.describe({"flags": {}})
            outputs.log(0, loss=1.0)
    assert shown(tmp_path) == [("loss", 0, 1.0)] * 2


def test_a_full_disk_is_heard_by_who_writes(tmp_path):
    file = EventFile(str(tmp_path))
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/events\.out\.tfevents\."):
        file.add(0, {"loss": 1.0})
