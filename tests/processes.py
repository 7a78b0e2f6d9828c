"""Several processes of one run, on this machine."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import helpers
from absl import flags

import absl_apps
from absl_apps import train_flags

SMALL = (
    *("--d_model=16", "--n_layer=1", "--n_head=4", "--seq_len=16", "--compute_dtype=float32"),
    *("--global_batch=16", "--microbatches=2", "--learning_rate=0.03"),
)
ROOT = pathlib.Path(absl_apps.__file__).parent.parent
# Gloo's own word, of several threads at once: cut anywhere between its pieces.
_GLOO = re.compile(
    r"(\[Gloo\] Rank | is connected to | peer ranks\.|Expected number of connected peer ranks is :"
    r"|\d+|\s)*"
)


class Processes:
    """The processes of one run on this machine; `each` may say more, flags and NAME=VALUE."""

    def __init__(self, directory, n, program, args, each=None):
        self.directory, self.started = directory, time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        here = [f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={n}"]
        self.all = []
        for i in range(n):
            own = [x for x in each[i] if x.startswith("-") or "=" not in x] if each else []
            more = dict(x.split("=") for x in each[i] if x not in own) if each else {}
            ids = ["--multihost", *here, f"--process_id={i}"]
            with open(self.path(i, "out"), "w") as out, open(self.path(i, "err"), "w") as err:
                command = [sys.executable, *program, *args, *own, *ids]
                where = {"env": environment(**more), "cwd": ROOT}
                self.all.append(subprocess.Popen(command, stdout=out, stderr=err, **where))

    def path(self, i, kind):
        return self.directory / f"{kind}{i}"

    def text(self, i, kind):
        return self.path(i, kind).read_text()

    def printed(self, i):
        """Returns the lines that a process wrote to stdout, without gloo's."""
        return [x for x in self.text(i, "out").splitlines() if not _GLOO.fullmatch(x)]

    def errors(self, i):
        """Returns what a process wrote to stderr, without what JAX logs."""
        return [x for x in self.text(i, "err").splitlines() if not re.match(r"I\d{4} ", x)]

    def codes(self, within):
        """Waits until all have ended; returns their exit codes."""
        deadline = time.monotonic() + within
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.all]

    def end(self):
        for process in self.all:
            process.kill()
            process.wait()


def environment(**more):
    """Returns an environment that says nothing of devices or clusters but that these are CPUs.

    The compiler is told what it is told in this process, as the losses are compared closely.
    """
    said = ("JAX_", "XLA_", "SLURM_", "OMPI_", "KUBERNETES_", "TPU_", "MEGASCALE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(said)}
    chosen = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": helpers.XLA_FLAGS}
    return kept | chosen | {"PYTHONPATH": str(ROOT)} | more


def wait_for_steps(processes, workdir):
    """Waits until two steps are in the metrics of a run."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and all(p.poll() is None for p in processes.all):
        path = workdir / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= 2:
            return
        time.sleep(0.1)
    raise AssertionError(processes.text(0, "err"))


def parse(*args):
    """Returns the flags of a run in this process."""
    values = flags.FlagValues()
    train_flags.parse(["train", *args], values, manual="")
    return values


def losses(workdir):
    """Returns the losses of a run, of which no step is missing or there twice."""
    lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]
