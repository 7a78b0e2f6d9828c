"""What a run leaves behind: `metrics.jsonl`, a line a step, and `run.json`, what was run."""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib
import numpy as np
import optax

import gradaccum

METRICS, RUN, PROFILE = "metrics.jsonl", "run.json", "profile"


class RunFiles:
    """The files of one run in one directory; nothing that an earlier run wrote is touched.

    Args:
      workdir: the directory, made if missing.
      writes: False in all processes of a run but one: then nothing is made nor written.

    Raises:
      ValueError: if the directory holds another run's metrics, or cannot be written.
    """

    def __init__(self, workdir: str, writes: bool = True):
        self.workdir = workdir
        self.writes = writes
        self.metrics_path = os.path.join(workdir, METRICS)
        self.run_path = os.path.join(workdir, RUN)
        self.profile_path = os.path.join(workdir, PROFILE)
        if writes:
            self._claim(workdir)

    def _claim(self, workdir: str) -> None:
        where = f"--workdir={workdir}"
        try:
            if os.path.exists(workdir) and not os.path.isdir(workdir):
                raise ValueError(f"{where}: is a file; name a directory.")
            os.makedirs(workdir, exist_ok=True)
            if not self._left_empty():
                open(self.metrics_path, "x").close()
        except FileExistsError as error:
            raise ValueError(
                f"{where}: {error.filename} exists, from another run, and is not overwritten; "
                "give this run a directory of its own."
            ) from None
        except OSError as error:
            raise ValueError(
                f"{where}: cannot be written: {error.strerror} ({error.filename})."
            ) from None

    def _left_empty(self) -> bool:
        """Whether an earlier run ended here before its first step: nothing worth keeping."""
        if os.path.isfile(self.metrics_path):
            return not os.path.getsize(self.metrics_path)
        if os.path.exists(self.run_path):  # without metrics it is no run of ours
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.run_path)
        return False

    def log(self, **metrics: float) -> None:
        """Append one line to metrics.jsonl; a reader sees it at once, and sees it whole."""
        line = json.dumps(metrics, allow_nan=False) + "\n"
        if not self.writes:
            return
        with open(self.metrics_path, "a") as stream:
            stream.write(line)

    def describe(self, run: Mapping[str, Any]) -> None:
        """Replace run.json in one move, so that it is never half written."""
        if not self.writes:
            return
        partial = self.run_path + ".partial"
        with open(partial, "w") as stream:
            json.dump(run, stream, indent=1, allow_nan=False)
            stream.write("\n")
        os.replace(partial, self.run_path)


def write_json(path: str, results: Mapping[str, Any]) -> None:
    """Write what a program found, as JSON."""
    with open(path, "w") as stream:
        json.dump(results, stream, indent=1)
        stream.write("\n")


def environment(mesh: jax.sharding.Mesh) -> dict[str, dict[str, Any]]:
    """Return the versions and the devices that a run's numbers depend on, for its JSON."""
    modules = gradaccum, jax, jaxlib, np, optax
    device = mesh.devices.flat[0]
    return {
        "versions": {"python": platform.python_version()}
        | {module.__name__: module.__version__ for module in modules},
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": mesh.devices.size,
        },
    }
