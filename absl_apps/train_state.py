"""What absl_apps.train carries from call to call, and how it lies on the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from absl_apps import transformer
from absl_apps.meshes import MODEL_AXIS
from absl_apps.train_setup import Setup


class TrainState(NamedTuple):
    """All that a run goes on from, but its position: the number of calls.

    Attributes:
      params: float32.
      opt_state: the optimizer's; where a step is several calls, a `MultiStepsState` around it.
      comm_state: the communication hook's, where no window holds it.
      window: the loss of the open window, a `MultiStepsState`; `()` where a step is one call.
      key: what dropout's keys are folded from; None without dropout.
    """

    params: transformer.Params
    opt_state: Any
    comm_state: Any = ()
    window: Any = ()
    key: jax.Array | None = None


def init_state(key: jax.Array, setup: Setup) -> TrainState:
    """Return the first state; jitted with the shardings of `describe_state`, made in place."""
    params = transformer.init(key, setup.config)
    state = TrainState(params, (), key=jax.random.fold_in(key, 1) if setup.config.dropout else None)
    if setup.every_k > 1:
        window = setup.loss_window().init(0.0)
        return state._replace(opt_state=setup.window().init(params), window=window)
    if setup.comm_hook is not None:
        state = state._replace(comm_state=setup.hook_mean().init(params))
    return state._replace(opt_state=setup.optimizer().init(params))


def describe_state(setup: Setup) -> TrainState:
    """Return the state as `jax.ShapeDtypeStruct`s with shardings on the mesh.

    Raises:
      ValueError: the hook does not fit the model or the mesh.
    """
    optimizer, shapes = setup.optimizer(), setup.param_shapes()
    whole = NamedSharding(setup.mesh, P())
    # Moments lie as the gradients that they are made of, counts of steps are whole.
    moments = optax.tree_map_params(
        optimizer,
        lambda _, where: where,
        jax.eval_shape(optimizer.init, shapes),
        setup.placed(setup.specs(1)),
        transform_non_params=lambda _: whole,
    )
    where = TrainState(setup.placed(setup.specs(3)), moments)
    if setup.every_k > 1:
        rows = _laid_out_by(setup.window().init, setup)
        where = where._replace(
            opt_state=rows._replace(inner_opt_state=moments),
            window=_laid_out_by(lambda _: setup.loss_window().init(0.0), setup),
        )
    elif setup.comm_hook is not None:
        where = where._replace(comm_state=_laid_out_by(setup.hook_mean().init, setup))
    if setup.config.dropout:
        where = where._replace(key=whole)
    state = jax.eval_shape(lambda: init_state(jax.random.key(0), setup))
    return jax.tree.map(_placed, state, where)


def _laid_out_by(init: Callable[[Any], Any], setup: Setup) -> Any:
    """Returns how a state lies that is made of parameters, which lie as their gradients (ZeRO)."""
    params = jax.tree.map(_placed, setup.param_shapes(), setup.placed(setup.specs(2)))
    lies = jax.jit(init).lower(params).compile().output_shardings
    whole = NamedSharding(setup.mesh, P())
    # What is made of no parameter lies on one device there, and on all where the step is run.
    return jax.tree.map(lambda x: x if len(x.device_set) == setup.mesh.size else whole, lies)


def _placed(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def saved_by(state: TrainState, setup: Setup, mesh: Mapping[str, int]) -> TrainState:
    """Return `describe_state`'s shapes as a run on another mesh has them, with shardings on this.

    Args:
      state: described.
      setup: of this run.
      mesh: sizes of the other mesh's axes by name.
    """
    if not setup.unreduced:
        return state
    return _mover(setup).resize(state, AbstractMesh(*_rows_as_on(mesh, setup)))


def moved(state: TrainState, setup: Setup, where: TrainState) -> TrainState:
    """Return a state that another mesh saved on this one, as `where` describes it."""
    if setup.unreduced:
        state = _mover(setup).resize(state, setup.mesh)
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, where))


def _mover(setup: Setup) -> gradaccum.MultiSteps:
    # Its resize knows the rows of windows and hooks; optimizer and k do not matter to it.
    return gradaccum.MultiSteps(
        optax.identity(), 1, axis_name=setup.data_axes, mesh=setup.mesh, comm_hook=setup.comm_hook
    )


def _rows_as_on(mesh: Mapping[str, int], setup: Setup) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns sizes of this mesh's data axes that make as many rows as another mesh does."""
    sizes = {axis: mesh.get(axis, 1) for axis in setup.data_axes}
    rows = math.prod(size for axis, size in mesh.items() if axis != MODEL_AXIS)
    named = getattr(setup.comm_hook, "axis_name", None) or ()
    compressed = (named,) if isinstance(named, str) else tuple(named)
    # What the other mesh calls otherwise: no axis that the hook compresses on, if it names some.
    rest = next((a for a in setup.data_axes if a not in compressed), setup.data_axes[0])
    sizes[rest] *= rows // math.prod(sizes.values())
    return tuple(sizes.values()), tuple(sizes)
