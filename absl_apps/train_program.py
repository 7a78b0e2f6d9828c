"""The step of absl_apps.train as a program to compile: its shapes on a mesh, and no arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import comm_hooks, meshes, train_flags, transformer
from absl_apps.optimizers import make_optimizer, make_schedule
from absl_apps.train_state import TrainState, init_state, state_specs
from absl_apps.train_step import make_step
from gradaccum import aot


class Program(NamedTuple):
    """What a step is made of, but for its number of microbatches.

    Attributes:
      config: the model.
      mesh: the devices, here or not.
      tx: the optimizer, with the communication hook in front where there is one.
      options: of `make_step`, after those.
      state, tokens: the step's arguments, `jax.ShapeDtypeStruct`s with shardings.
    """

    config: transformer.Config
    mesh: jax.sharding.Mesh
    tx: optax.GradientTransformation
    options: tuple[Any, ...]
    state: TrainState
    tokens: jax.ShapeDtypeStruct

    def step(self, microbatches: int) -> Any:
        """Return the jitted step (state, tokens) -> (state, loss)."""
        return make_step(self.config, self.mesh, microbatches, self.tx, *self.options)


def describe(chosen: Mapping[str, Any], mesh: jax.sharding.Mesh) -> Program:
    """Describe the step that absl_apps.train would take with these flags on this mesh.

    Args:
      chosen: flags by name: the model's, global_batch, optimizer, comm_hook, sharding and
        sequence_parallel.
      mesh: devices, here or not.

    Raises:
      ValueError: the hook does not fit the mesh.
    """
    sizes = ("d_model", "n_layer", "n_head", "compute_dtype")
    config = transformer.Config(*(chosen[name] for name in sizes))
    tx = make_optimizer(chosen["optimizer"], make_schedule(1e-3, 1, 2))  # the program is the same
    specs, grad_specs = state_specs(chosen["sharding"], config, tx, mesh)
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    shapes = jax.eval_shape(lambda: init_state(jax.random.key(0), config, tx))
    state = jax.tree.map(_placed, shapes, where)
    hooked = None
    if chosen["comm_hook"]:
        hook = comm_hooks.parse(chosen["comm_hook"])
        data_axes = meshes.data_axes(mesh)
        comm_hooks.check_axes(hook, data_axes)
        tx, state, hooked = _hooked(hook, tx, state, grad_specs, mesh)
    shape = chosen["global_batch"], chosen["seq_len"] + 1
    split = NamedSharding(mesh, P(meshes.data_axes(mesh)))
    tokens = jax.ShapeDtypeStruct(shape, "uint8", sharding=split)
    options = chosen["sharding"], chosen["sequence_parallel"], hooked
    return Program(config, mesh, tx, options, state, tokens)


def _placed(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _hooked(
    hook: Any,
    tx: optax.GradientTransformation,
    state: TrainState,
    grad_specs: Any,
    mesh: jax.sharding.Mesh,
) -> tuple[optax.GradientTransformation, TrainState, TrainState]:
    """As comm_hooks.chained, of shapes: the optimizer, the state, and how that lies."""
    mean, where = comm_hooks.mean_of(hook, grad_specs, mesh, meshes.data_axes(mesh))
    params = jax.tree.map(_placed, state.params, where)
    # The hook's own state lies as the compiler places it: residuals split over devices.
    compiled = jax.jit(mean.init).lower(params).compile()
    replicated = NamedSharding(mesh, P())
    # What is made of no parameter lies on one device there, and on all where the step is run.
    lies = [
        x if len(x.device_set) == mesh.size else replicated
        for x in jax.tree.leaves(compiled.output_shardings)
    ]
    shapes, treedef = jax.tree.flatten(jax.eval_shape(mean.init, params))
    of_hook = jax.tree.unflatten(treedef, map(_placed, shapes, lies))
    state = TrainState(state.params, (of_hook, state.opt_state))
    return optax.chain(mean, tx), state, jax.tree.map(lambda x: x.sharding, state)


def check_limit(mesh: jax.sharding.Mesh, memory_limit: int | None) -> None:
    """Raise ValueError where neither the user nor the devices say how much memory there is."""
    device = mesh.devices.flat[0]
    if memory_limit is None and aot.memory_limit(device) is None:
        raise ValueError(
            f"--hbm_gb: a device of kind {device.device_kind} has no limit of its own; say how "
            "many GB a step may take on each, as --hbm_gb=0.05."
        )


def plan(chosen: Mapping[str, Any], mesh: jax.sharding.Mesh, memory_limit: int | None) -> aot.Plan:
    """Find the fewest microbatches of a step that fit; of the divisors of a device's batch.

    Args:
      chosen, mesh: as of `describe`.
      memory_limit: bytes on each device; None: the device's own.

    Raises:
      ValueError: the batch does not divide over the devices, no limit is known, or nothing fits.
    """
    devices = math.prod(mesh.shape[axis] for axis in meshes.data_axes(mesh))
    train_flags.check_batch(chosen["global_batch"], 1, devices)
    check_limit(mesh, memory_limit)
    rows = chosen["global_batch"] // devices
    program = describe(chosen, mesh)
    return aot.plan_microbatches(
        program.step,
        program.state,
        program.tokens,
        candidates=[k for k in range(1, rows + 1) if rows % k == 0],
        memory_limit=memory_limit,
    )
