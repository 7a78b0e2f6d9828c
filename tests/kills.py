"""Kill absl_apps.train at random points, restart it, and compare with a run that nothing stopped.

python -m tests.kills --kills=20 --seed=1
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from absl import app, flags

import absl_apps

ROOT = pathlib.Path(absl_apps.__file__).parent.parent
# All that a state can hold: an open window of rows, a hook's errors, keys of dropout.
RUN = (
    *("--d_model=16", "--n_layer=1", "--n_head=2", "--seq_len=16", "--global_batch=64"),
    *("--microbatches=2", "--every_k=4", "--eval_every=7", "--checkpoint_every=3"),
    *("--dropout=0.1", "--comm_hook=int8_quantize:error_feedback=True", "--cpu_devices=4"),
)
KILLS = "window", "checkpoint", "anywhere"
ASKS = "SIGTERM", "SIGINT"  # which a run heeds, and saves
_POLL = 0.002  # seconds


def start(workdir: pathlib.Path, *args: str) -> subprocess.Popen[str]:
    """Start the program; what it prints is in a pipe."""
    command = [sys.executable, "-m", "absl_apps.train", *RUN, f"--workdir={workdir}", *args]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def finish(process: subprocess.Popen[str], within: float = 300) -> str:
    """Wait for the end of a run, which must be a good one; return what it printed."""
    try:
        printed, _ = process.communicate(timeout=within)
    finally:
        process.kill()
    if process.returncode:
        raise AssertionError(f"exit code {process.returncode}:\n{printed}")
    return printed


def stop(
    process: subprocess.Popen[str], workdir: pathlib.Path, point: str, how: random.Random
) -> str:
    """Send SIGKILL in mid-window, in mid-checkpoint or anywhere, or ask; return where that was.

    Args:
      process: that has just started.
      workdir: its own.
      point: of KILLS or ASKS.
      how: chooses.
    """
    before, began = steps(workdir), time.monotonic()
    if point == "anywhere":
        wait = how.uniform(0, 12)  # which is long before the first step, or so many after it
        _until(process, lambda: time.monotonic() > began + wait or steps(workdir) > before + 6)
    else:
        _until(process, lambda: steps(workdir) not in (0, before))  # it has begun
        first = steps(workdir) + how.randrange(3, 8)  # after a checkpoint at least
        _until(process, lambda: steps(workdir) >= first)
    if point == "checkpoint":
        _until(process, lambda: any((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*")))
        time.sleep(how.uniform(0, 0.02))
    elif point != "anywhere":
        at, since = steps(workdir), time.monotonic()
        _until(process, lambda: steps(workdir) > at)
        time.sleep(how.uniform(0.3, 0.9) * (time.monotonic() - since))
    half = [path.name for path in (workdir / "checkpoints").glob("*tmp*")]
    process.send_signal(signal.Signals[point] if point in ASKS else signal.SIGKILL)
    return f"{point}: {steps(workdir)} steps were logged, being written: {half or 'nothing'}"


def _until(process: subprocess.Popen[str], there, within: float = 120) -> None:
    """Waits until something is there, the process has ended, or for so many seconds."""
    deadline = time.monotonic() + within
    while not there() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL)


def steps(workdir: pathlib.Path) -> int:
    """Return the lines of metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def left(workdir: pathlib.Path) -> dict[str, object]:
    """Return what is to be the same to the last bit: all lines, the last state's fingerprints."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["tokens_per_second"]
    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    facts = json.loads((newest / "facts.json").read_text())
    return {"metrics": lines, "call": newest.name, "state": facts["leaves"]}


def compare(
    directory: pathlib.Path, points: Sequence[str], seed: int, say: Callable[[str], object] = print
) -> list[str]:
    """Raise AssertionError unless a run that is stopped at these points leaves what another does.

    Returns:
      What it printed each time.
    """
    whole, stopped, how = directory / "whole", directory / "stopped", random.Random(seed)
    enough = f"--steps={8 + 8 * len(points)}"
    finish(start(whole, enough))
    printed = []
    for i, point in enumerate(points):
        process = start(stopped, enough)
        told = stop(process, stopped, point, how)
        printed.append(process.communicate(timeout=120)[0])
        say(f"{i + 1}: exit code {process.returncode}; {told}")
        expected = {"SIGTERM": 0, "SIGINT": 130}.get(point, -signal.SIGKILL)
        assert process.returncode == expected, printed[-1]
    finish(start(stopped, enough))
    assert left(stopped) == left(whole)
    say(f"{len(points)} stops: {steps(whole)} lines and the last state are equal to the last bit")
    return printed


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as directory:
        points = [KILLS[i % len(KILLS)] for i in range(flags.FLAGS.kills)]
        compare(pathlib.Path(directory), points, flags.FLAGS.seed)


if __name__ == "__main__":
    flags.DEFINE_integer("kills", 20, "How often.")
    flags.DEFINE_integer("seed", 0, "Of the points.")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    app.run(main)
