"""A run of absl_apps.train that goes on: its checkpoints, and the state of the newest."""

from __future__ import annotations

import json
import os
from typing import Any

from absl_apps import cluster, train_program, train_start
from absl_apps.checkpoints import Checkpoints
from absl_apps.train_state import TrainState, moved, saved_by


def open_checkpoints(
    start: train_start.Start, keep: int
) -> tuple[Checkpoints | None, dict[str, Any] | None]:
    """Return the run's checkpoints, and what process 0 reads beside the arrays of the newest.

    That is the facts that the loop saves, and whether the run is "finished".

    Raises:
      ValueError: in all processes, where the newest is not whole.
    """
    if not keep:
        return None, None
    outputs, found = start.outputs, None
    with cluster.failing_together():
        checkpoints = Checkpoints(outputs.checkpoints_path, keep=keep)
        if outputs.writes and (latest := checkpoints.latest()) is not None:
            ended = "final_loss" in (outputs.earlier or {})
            finished = ended and os.path.exists(outputs.chart_path)
            found = {**checkpoints.facts(latest), "finished": finished}
    return checkpoints, json.loads(cluster.exchange(json.dumps(found))[0])


def restored(
    program: train_program.Program, checkpoints: Checkpoints, saved: dict[str, Any]
) -> TrainState:
    """Return the state that was saved, on the devices that are here."""
    like = saved_by(program.state, program.setup, saved["mesh"])
    state = checkpoints.restore(saved["progress"]["calls"], like)
    return moved(state, program.setup, program.state)
