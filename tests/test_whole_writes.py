"""A disk that is full, or fills up: one line of error, and no half of a file."""

import errno
import json
import os
import subprocess
import sys

import pytest
from event_records import shown

from absl_apps.run_files import RunFiles
from absl_apps.whole_writes import GrowingFile, replace


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("metrics.jsonl", lambda outputs: outputs.log(0, loss=1.0)),
        ("run.json.partial", lambda outputs: outputs.describe({"flags": {"new": 1}})),
        ("loss.png.partial", lambda outputs: outputs.chart()),
    ],
    ids=["metrics", "run", "chart"],
)
def test_a_full_disk_is_one_line(tmp_path, name, act):
    (tmp_path / "run.json").write_text('{"flags": {}}')
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/full")
    with RunFiles(str(tmp_path)) as outputs, pytest.raises(ValueError, match="cannot be") as error:
        act(outputs)
    assert str(error.value) == (
        f"--workdir={tmp_path}: cannot be used: No space left on device ({tmp_path / name}); mend "
        "that, and the same command goes on."
    )
    assert (tmp_path / "run.json").read_text() == '{"flags": {}}'
    assert not (tmp_path / "loss.png").exists()


# In a process of its own: the limit, which stands for a disk that fills up, is the process's.
FILLING = """
import resource, sys, time
from absl_apps.run_files import RunFiles
outputs = RunFiles(sys.argv[1])
outputs.describe({"flags": {}})
values = eval(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
for step in range(1000):
    try:
        outputs.log(step, **values)
    except ValueError as error:
        print(step, error)
        break
started = time.monotonic()
outputs.settle()
outputs.close()
print(time.monotonic() - started)
"""


@pytest.mark.parametrize(
    ("values", "file"),
    [("{'note': 'x' * 100, 'loss': 1.5}", "metrics.jsonl"), ("{c: 1 for c in 'abcdef'}", "events")],
    ids=["metrics", "events"],
)
def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path, values, file):
    command = [sys.executable, "-W", "error", "-c", FILLING, str(tmp_path), values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode == 0
    told, seconds = done.stdout.splitlines()
    step, _, message = told.partition(" ")
    assert message.startswith(f"--workdir={tmp_path}: cannot be used: File too large (")
    assert file in message.rpartition("(")[2]
    assert float(seconds) < 5
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert lines.endswith("\n")  # and no part of the line that did not fit
    steps = [json.loads(line)["step"] for line in lines.splitlines()]
    assert steps == list(range(int(step) + (file == "events")))
    assert {at for _, at, _ in shown(tmp_path)} == set(range(int(step)))


def test_a_piece_that_does_not_fit_is_cut_off_and_the_next_is_whole(tmp_path, monkeypatch):
    growing = GrowingFile(str(tmp_path / "file"))
    growing.append(b"one\n")
    write, calls = os.write, []

    def fills_up(file, piece):
        calls.append(piece)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, piece[:2])

    monkeypatch.setattr(os, "write", fills_up)
    with pytest.raises(OSError, match=r"No space left on device: '.*/file'"):
        growing.append(b"two\n")
    assert calls == [b"two\n", b"o\n"]
    assert (tmp_path / "file").read_bytes() == b"one\n"
    monkeypatch.undo()
    growing.append(b"three\n")
    assert growing.sync() == 10
    assert (tmp_path / "file").read_bytes() == b"one\nthree\n"


def test_a_replaced_file_is_the_old_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace(str(path), b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        replace(str(path), b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]
