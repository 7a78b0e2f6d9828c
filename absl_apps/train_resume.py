"""A run of absl_apps.train that goes on: its checkpoints, and the state of the newest."""

from __future__ import annotations

import json
import os
from typing import Any

from absl_apps import checkpoint_files, cluster, run_files, train_program, train_start
from absl_apps.checkpoints import Checkpoints
from absl_apps.train_state import TrainState, moved, saved_by


def open_checkpoints(
    start: train_start.Start, keep: int
) -> tuple[Checkpoints | None, dict[str, Any] | None]:
    """Return the run's checkpoints, and what process 0 reads beside the arrays of the newest.

    That is the facts that the loop saves, and whether the run is "finished".

    Raises:
      ValueError: in all processes, where the newest is not whole, or there is one and none is kept.
    """
    outputs, checkpoints, found = start.outputs, None, None
    with cluster.failing_together():
        if keep:
            checkpoints = Checkpoints(outputs.checkpoints_path, keep=keep)
        if outputs.writes:
            found = _newest(outputs, checkpoints)
    return checkpoints, json.loads(cluster.exchange(json.dumps(found))[0])


def _newest(outputs: run_files.RunFiles, checkpoints: Checkpoints | None) -> dict[str, Any] | None:
    ended = "final_loss" in (outputs.earlier or {}) and os.path.exists(outputs.chart_path)
    if checkpoints and (latest := checkpoints.latest()) is not None:
        return {**checkpoints.facts(latest), "finished": ended}
    if ended:  # its checkpoints may be gone, or it had none
        return {"progress": {}, "finished": True}
    if not checkpoints and checkpoint_files.calls_in(outputs.checkpoints_path):
        raise ValueError(
            f"--keep=0: a run without checkpoints begins at step 0, and {outputs.where} has some "
            "to go on from; give --keep=1 or more, or a --workdir of its own."
        )
    return None


def restored(
    program: train_program.Program, checkpoints: Checkpoints, saved: dict[str, Any]
) -> TrainState:
    """Return the state that was saved, on the devices that are here."""
    like = saved_by(program.state, program.setup, saved["mesh"])
    state = checkpoints.restore(saved["progress"]["calls"], like)
    return moved(state, program.setup, program.state)
