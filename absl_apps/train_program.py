"""The step of absl_apps.train as a program to compile: from its flags, on a mesh, and no arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import comm_hooks, meshes, train_checks, transformer
from absl_apps.optimizers import LEARNING_RATES, make_optimizer, make_schedule
from absl_apps.train_setup import Setup
from absl_apps.train_state import TrainState, describe_state
from absl_apps.train_step import Batch, make_evaluation, make_step
from gradaccum import aot


@dataclasses.dataclass(frozen=True)
class Program:
    """What a run computes, but for its number of microbatches.

    Attributes:
      setup: what a step is made of.
      state, batch, call: the arguments of a step, `jax.ShapeDtypeStruct`s with shardings.
    """

    setup: Setup
    state: TrainState
    batch: Batch
    call: jax.ShapeDtypeStruct

    @property
    def args(self) -> tuple[TrainState, Batch, jax.ShapeDtypeStruct]:
        return self.state, self.batch, self.call

    def step(self, microbatches: int) -> Any:
        """Return the jitted (state, batch, call) -> (state, measured)."""
        return make_step(self.setup, microbatches, self.state)

    def evaluation(self, microbatches: int) -> Any:
        """Return the jitted (params, batch) -> (sum of losses, number of targets)."""
        return make_evaluation(self.setup, microbatches)


def model(chosen: Mapping[str, Any]) -> transformer.Config:
    """Return the model that the flags say.

    Raises:
      ValueError: its sizes do not fit each other.
    """
    sizes = ("d_model", "n_layer", "n_head", "compute_dtype")
    return transformer.Config(
        *(chosen[name] for name in sizes),
        vocab_size=chosen["vocab_size"] or transformer.VOCABULARY,
        dropout=chosen["dropout"],
        remat=chosen["remat"],
    )


def schedule(chosen: Mapping[str, Any]) -> optax.Schedule:
    """Return the learning rate of each step."""
    peak = chosen["learning_rate"]
    if peak is None:
        peak = LEARNING_RATES[chosen["optimizer"]]
    return make_schedule(peak, chosen["warmup_steps"], chosen["steps"], chosen["schedule"])


def describe(chosen: Mapping[str, Any], mesh: jax.sharding.Mesh) -> Program:
    """Describe the step that absl_apps.train takes with these flags on this mesh.

    Args:
      chosen: flags by name, as of train_flags; those of the optimizer that are left out take
        defaults.
      mesh: devices, here or not.

    Raises:
      ValueError: the model, the batch or the hook does not fit the mesh.
    """
    config = model(chosen)
    axes = dict(mesh.shape)
    train_checks.check_axes(axes)
    train_checks.check_model_axis(axes, config, chosen["seq_len"], chosen["sequence_parallel"])
    how = {name: chosen[name] for name in ("reduce_dtype", "comm_hook", "every_k")}
    train_checks.check_reduction(**how)
    hook = chosen["comm_hook"] and comm_hooks.parse(chosen["comm_hook"])
    comm_hooks.check_axes(hook, meshes.data_axes(mesh))
    # What the schedule is does not change the program.
    rate = schedule(chosen) if "schedule" in chosen else make_schedule(1e-3, 1, 2)
    decay = {name: chosen[name] for name in ("weight_decay", "clip_norm") if name in chosen}
    setup = Setup(
        config,
        mesh,
        make_optimizer(chosen["optimizer"], rate, **decay),
        train_checks.stage(chosen["zero"], axes),
        chosen["sequence_parallel"],
        chosen["every_k"],
        hook or None,
        chosen["reduce_dtype"],
    )
    rows, length = chosen["global_batch"] // setup.every_k, chosen["seq_len"]
    split = NamedSharding(mesh, P(setup.data_axes))
    tokens = np.uint8 if chosen["vocab_size"] is None else np.uint16
    batch = {
        "tokens": jax.ShapeDtypeStruct((rows, length + 1), tokens, sharding=split),
        "mask": jax.ShapeDtypeStruct((rows, length), bool, sharding=split),
    }
    call = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P()))
    return Program(setup, describe_state(setup), batch, call)


def check_limit(mesh: jax.sharding.Mesh, memory_limit: int | None) -> None:
    """Raise ValueError where neither the user nor the devices say how much memory there is."""
    device = mesh.devices.flat[0]
    if memory_limit is None and aot.memory_limit(device) is None:
        raise ValueError(
            f"--hbm_gb: a device of kind {device.device_kind} has no limit of its own; say how "
            "many GB a step may take on each, as --hbm_gb=0.05."
        )


def plan(chosen: Mapping[str, Any], mesh: jax.sharding.Mesh, memory_limit: int | None) -> aot.Plan:
    """Find the fewest microbatches of a call that fit; of the divisors of a device's batch.

    Args:
      chosen, mesh: as of `describe`.
      memory_limit: bytes on each device; None: the device's own.

    Raises:
      ValueError: the batch does not divide over the devices, no limit is known, or nothing fits.
    """
    devices = math.prod(mesh.shape[axis] for axis in meshes.data_axes(mesh))
    calls = chosen["every_k"]
    train_checks.check_batch(chosen["global_batch"], calls, 1, devices)
    check_limit(mesh, memory_limit)
    rows = chosen["global_batch"] // (calls * devices)
    program = describe(chosen, mesh)
    return aot.plan_microbatches(
        program.step,
        *program.args,
        candidates=[k for k in range(1, rows + 1) if rows % k == 0],
        memory_limit=memory_limit,
    )
