"""Checkpoints of processes that are killed, meet a full disk, are several, or just end."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import checkpoint_worker as worker
import helpers
import pytest

from absl_apps import checkpoints

ROOT = pathlib.Path(checkpoints.__file__).parent.parent
REMARKS = r"cudart_stub|absl::InitializeLog|^I\d{4} |Gloo"  # of JAX itself


def start(act, directory, *args):
    said = ("JAX_", "XLA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(said)}
    command = [sys.executable, str(ROOT / "tests" / "checkpoint_worker.py"), act, str(directory)]
    return subprocess.Popen(
        [*command, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=kept | {"XLA_FLAGS": helpers.XLA_FLAGS, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )


def errors(text):
    return [line for line in text.splitlines() if not re.search(REMARKS, line)]


def half_written(directory):
    return [path.name for path in directory.glob("*tmp*")]


@pytest.fixture
def ended():
    """Holds processes, and ends those that a test leaves behind."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_quiet_and_over_when_closed(tmp_path, ended):
    process = start("quiet", tmp_path)
    ended.append(process)
    out, err = process.communicate(timeout=120)
    over = time.time()
    assert process.returncode == 0, err
    assert (out, errors(err)) == ("", [])
    assert over - float((tmp_path / "ended").read_text()) < 3  # of which Python's end is most


def newest(directory):
    return max((int(path.name) for path in directory.iterdir() if path.name.isdigit()), default=0)


def test_killed_in_mid_write_the_one_before_is_whole(tmp_path, ended):
    """Thrice; each process goes on from what the one before it left."""
    mesh, last, left = worker.mesh_of(dp=4), 0, []
    for _ in range(3):
        process = start("kill", tmp_path)
        ended.append(process)
        deadline = time.monotonic() + 120
        while newest(tmp_path) <= last or not half_written(tmp_path):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        left += half_written(tmp_path)
        with checkpoints.Checkpoints(tmp_path, keep=2) as made:
            assert not half_written(tmp_path)
            call = made.latest()
            assert call > last
            assert made.facts(call) == {"call": call}
            restored = made.restore(call, worker.state_at(0, mesh, width=2**16))
        assert worker.bits(restored) == worker.bits(worker.state_at(call, mesh, width=2**16))
        last = call
    assert left, "no kill was in mid-write"


def check_told(path, seen, why):
    for text in seen:
        assert "\n" not in text
        assert re.fullmatch(
            rf"--workdir: {re.escape(str(path))}/3 could not be written: {why}; "
            r"the newest whole one is of call 2\. Mend that, .*",
            text,
        ), text
    left = sorted(p.name for p in path.iterdir() if p.name.isdigit())
    assert left == ["1", "2", "5"]
    assert not half_written(path)
    mesh = worker.mesh_of(dp=2)
    with checkpoints.Checkpoints(path, keep=3) as made:
        for call in 1, 2, 5:
            restored = made.restore(call, worker.state_at(0, mesh))
            assert worker.bits(restored) == worker.bits(worker.state_at(call, mesh))


def test_a_file_that_may_not_grow_is_one_line(tmp_path, ended):
    """As on a full disk: the error comes from native code, in the background."""
    process = start("limit", tmp_path, f"--limit={2**20}")
    ended.append(process)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert not errors(err)
    check_told(tmp_path, json.loads(out), "File too large")


def test_a_full_disk_is_one_line(tmp_path, ended):
    """On a file system of 8 MB, where this process may mount one; else nothing can be full."""
    size = ["-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *size], capture_output=True).returncode:
        pytest.xfail("no mount is allowed here; the test above has the same path")
    try:
        process = start("limit", tmp_path, f"--limit={2**30}")
        ended.append(process)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert not errors(err)
        check_told(tmp_path, json.loads(out), "No space left on device")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def two(directory, ended, *args):
    """Runs two processes on one directory; returns exit codes, outputs and seconds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"--address=127.0.0.1:{server.getsockname()[1]}"
    began = time.monotonic()
    both = [start("two", directory, f"--index={i}", address, *args) for i in range(2)]
    ended.extend(both)
    told = [process.communicate(timeout=200)[1] for process in both]
    return [process.returncode for process in both], told, time.monotonic() - began


def one_saves_five(directory):
    with checkpoints.Checkpoints(directory, keep=2) as made:
        made.save(5, worker.state_at(5, worker.mesh_of(dp=8)), {"call": 5})


def test_two_processes_and_one_restore_each_others(tmp_path, ended):
    one_saves_five(tmp_path)
    codes, told, _ = two(tmp_path, ended)
    assert codes == [0, 0], told
    assert [errors(text) for text in told] == [[], []]
    mesh = worker.mesh_of(dp=8)
    with checkpoints.Checkpoints(tmp_path, keep=2) as made:
        assert (made.latest(), made.facts(7)) == (7, {"call": 7})
        for call in 6, 7:  # 5 is gone
            restored = made.restore(call, worker.state_at(0, mesh))
            assert worker.bits(restored) == worker.bits(worker.state_at(call, mesh))
        with pytest.raises(ValueError, match=r"5 is not there; there are: 6, 7\."):
            made.facts(5)


@pytest.mark.slow
def test_where_one_of_two_cannot_write_both_end(tmp_path, ended):
    one_saves_five(tmp_path)
    codes, told, seconds = two(tmp_path, ended, f"--limit={2**20}")
    assert 0 not in codes
    assert seconds < 60
    assert re.search(r"worker: --workdir: .*/8 could not be written: File too large", told[1])
    with checkpoints.Checkpoints(tmp_path, keep=2) as made:
        assert made.latest() == 7
        assert not half_written(tmp_path)
