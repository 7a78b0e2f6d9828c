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

from absl_apps import bench_steps, meshes, train_checks, train_program, transformer
from absl_apps.bench_problem import OURS, Contender, Problem
from absl_apps.train_state import TrainState
from absl_apps.train_step import Batch

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
    k = chosen["microbatches"]
    program = train_program.describe(chosen, mesh)
    setup = program.setup
    devices = math.prod(mesh.shape[axis] for axis in setup.data_axes)
    train_checks.check_batch(chosen["global_batch"], setup.every_k, k, devices)
    ours = Contender(program.step(k), program.args, ours=True, calls=setup.every_k)
    others: Programs = {NAIVE: None, MULTISTEPS: None}
    # A hook replaces the mean, and sequence parallelism the layers' sums: the compiler has neither.
    # A window is optax.MultiSteps's, of one microbatch a call.
    if not setup.unreduced and not setup.sequence_parallel:
        others = {NAIVE: _naive(program, k), MULTISTEPS: _multisteps(program, k)}
    return others | {OURS: ours}


def _naive(program: train_program.Program, k: int) -> Contender:
    """A scan of value_and_grad under jit; the compiler places what shardings do not say."""
    setup, where, loss_fn = program.setup, _shardings(program.state), _loss_fn(program)
    split = NamedSharding(setup.mesh, P(None, setup.data_axes))
    whole = NamedSharding(setup.mesh, P())

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(where, whole))
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        batch = jax.tree.map(lambda x: x.reshape(k, -1, x.shape[1]), batch)
        batch = jax.lax.with_sharding_constraint(batch, split)

        def add(total: Any, microbatch: Batch) -> tuple[Any, None]:
            new = jax.value_and_grad(loss_fn)(state.params, microbatch)
            return jax.tree.map(jnp.add, total, new), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        total, _ = jax.lax.scan(add, zeros, batch)
        loss, grads = jax.tree.map(lambda x: x / k, total)
        return _updated(setup.optimizer(), state, grads), loss

    return Contender(step, (program.state, program.batch))


def _multisteps(program: train_program.Program, k: int) -> Contender:
    """k calls of a step of one microbatch, in which optax.MultiSteps adds."""
    setup = program.setup
    tx = optax.MultiSteps(setup.optimizer(), every_k_schedule=k)
    whole = NamedSharding(setup.mesh, P())
    opt_state = optax.tree_map_params(
        tx,
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        jax.eval_shape(tx.init, program.state.params),
        setup.placed(setup.specs(1)),
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
    )
    state = program.state._replace(opt_state=opt_state)
    loss_fn = _loss_fn(program)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(_shardings(state), whole))
    def call(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return _updated(tx, state, grads), loss

    def part(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = x.shape[0] // k, *x.shape[1:]
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    return Contender(call, (state, jax.tree.map(part, program.batch)), calls=k)


def _loss_fn(program: train_program.Program) -> Any:
    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        return transformer.loss(params, batch["tokens"], program.setup.config, mask=batch["mask"])

    return loss_fn


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def _updated(tx: Any, state: TrainState, grads: Any) -> TrainState:
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state)
