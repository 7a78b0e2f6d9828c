"""The programs that absl_apps.audit compiles: the first seed's step, absl_apps.train's, a user's.

Each of the first two is written three times: as a loop under jit, with optax.MultiSteps, and with
gradaccum. Nothing is allocated: arguments are shapes with shardings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import bench_steps, meshes, train_flags, train_program, transformer
from absl_apps.bench_problem import OURS, Contender, Problem
from absl_apps.train_state import TrainState, init_state, state_specs

NAIVE, MULTISTEPS = "naive", "optax.MultiSteps"
Programs = dict[str, Contender | None]  # None: such a program is not written


######################################## The first seed's ########################################


def seed(chosen: Mapping[str, Any], mesh: jax.sharding.Mesh) -> Programs:
    """Return the first seed's step in three forms.

    Args:
      chosen: flags by name, with absl_apps.bench's names. A batch_size of None is a row a
        microbatch on each device, as the seed has.
      mesh: its axes are all data axes.

    Raises:
      ValueError: the mesh has a model axis, or the batch does not divide.
    """
    if meshes.MODEL_AXIS in mesh.shape:
        raise ValueError(
            f"--mesh: the seed's step has no model axis, the mesh has {meshes.MODEL_AXIS}="
            f"{mesh.shape[meshes.MODEL_AXIS]}; name data axes alone, or take --program=train."
        )
    k = chosen["grad_acc_steps"]
    multiple = k * mesh.size
    rows = chosen["batch_size"] or multiple
    if remainder := rows % multiple:
        below = rows - remainder
        raise ValueError(
            f"--batch_size={rows}: not divisible by grad_acc_steps * devices = {k} * {mesh.size} "
            f"= {multiple}; the nearest that is: {f'{below} or ' if below else ''}"
            f"{below + multiple}."
        )
    sizes = (k, rows, chosen["d_model"], chosen["n_layer"], jnp.dtype(chosen["dtype"]))
    problem = Problem(mesh, *sizes, chosen["donate"])
    builders = {NAIVE: "naive", MULTISTEPS: "multisteps", OURS: OURS}
    steps = {ours: bench_steps.CONTENDERS[theirs](problem) for ours, theirs in builders.items()}
    return {name: step._replace(gradients=None) for name, step in steps.items()}


######################################## absl_apps.train's #######################################


def train(chosen: Mapping[str, Any], mesh: jax.sharding.Mesh) -> Programs:
    """Return the training program's step in three forms, of which a hook has gradaccum's alone.

    Args:
      chosen: flags by name, with absl_apps.train's names; microbatches a number.
      mesh: with the axes that absl_apps.train knows.

    Raises:
      ValueError: the model, the batch or the hook does not fit the mesh.
    """
    config = transformer.Config(
        *(chosen[name] for name in ("d_model", "n_layer", "n_head", "compute_dtype"))
    )
    axes, k = dict(mesh.shape), chosen["microbatches"]
    train_flags.check_axes(axes)
    train_flags.check_model_axis(axes, config, chosen["seq_len"], chosen["sequence_parallel"])
    devices = math.prod(axes[axis] for axis in meshes.data_axes(mesh))
    train_flags.check_batch(chosen["global_batch"], k, devices)
    program = train_program.describe(chosen, mesh)
    ours = Contender(program.step(k), (program.state, program.tokens), ours=True)
    others: Programs = {NAIVE: None, MULTISTEPS: None}
    # A hook replaces the mean and sequence parallelism the layers' sums: the compiler has neither.
    if not chosen["comm_hook"] and not chosen["sequence_parallel"]:
        others = {
            NAIVE: _naive(program, k),
            MULTISTEPS: _multisteps(program, k, chosen["sharding"]),
        }
    return others | {OURS: ours}


def _naive(program: train_program.Program, k: int) -> Contender:
    """A scan of value_and_grad under jit; the compiler places what shardings do not say."""
    where, loss_fn = _shardings(program.state), _loss_fn(program)
    split = NamedSharding(program.mesh, P(None, meshes.data_axes(program.mesh)))
    whole = NamedSharding(program.mesh, P())

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(where, whole))
    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        batch = tokens.reshape(k, -1, tokens.shape[1])
        batch = jax.lax.with_sharding_constraint(batch, split)

        def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
            new = jax.value_and_grad(loss_fn)(state.params, microbatch)
            return jax.tree.map(jnp.add, total, new), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        total, _ = jax.lax.scan(add, zeros, batch)
        loss, grads = jax.tree.map(lambda x: x / k, total)
        return _updated(program.tx, state, grads), loss

    return Contender(step, (program.state, program.tokens))


def _multisteps(program: train_program.Program, k: int, sharding: str) -> Contender:
    """k calls of a step of one microbatch, in which optax.MultiSteps adds."""
    tx = optax.MultiSteps(program.tx, every_k_schedule=k)
    specs, _ = state_specs(sharding, program.config, tx, program.mesh)
    where = jax.tree.map(lambda spec: NamedSharding(program.mesh, spec), specs)
    shapes = jax.eval_shape(lambda: init_state(jax.random.key(0), program.config, tx))
    state = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, where
    )
    loss_fn = _loss_fn(program)
    whole = NamedSharding(program.mesh, P())

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(where, whole))
    def call(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
        return _updated(tx, state, grads), loss

    rows, length = program.tokens.shape
    split = program.tokens.sharding
    tokens = jax.ShapeDtypeStruct((rows // k, length), program.tokens.dtype, sharding=split)
    return Contender(call, (state, tokens), calls=k)


def _loss_fn(program: train_program.Program) -> Any:
    return lambda params, tokens: transformer.loss(params, tokens, program.config)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def _updated(tx: Any, state: TrainState, grads: Any) -> TrainState:
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state)
