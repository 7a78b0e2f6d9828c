"""`all_reduce_mean`: the mean of unreduced gradients, as an element of an optax chain."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from gradaccum import _checks, _comm
from gradaccum._given import read
from gradaccum._means import means
from gradaccum._mesh import AxisName, check_axes, find_mesh, mesh_of
from gradaccum._reduce import accumulator_of
from gradaccum._rows import settle


def all_reduce_mean(
    axis_name: AxisName, *, mesh: Mesh | AbstractMesh | None = None, comm_hook: Any = None
) -> optax.GradientTransformation:
    """Take the mean of unreduced gradients: a chain element, once in every call.

    `optax.chain(all_reduce_mean("dp"), adamw(...))` with `gradaccum.unreduced_value_and_grad` is
    data parallelism with one reduction a call, where the microbatches are all in that call.

    Args:
      axis_name: the data axis or axes of the mesh.
      mesh: the mesh, if it is not that of `jax.set_mesh` and the gradients were not given one.
      comm_hook: takes the mean in place of the all-reduce, as `gradaccum.hooks.bf16_compress()`.

    Returns:
      A transformation of `Unreduced` gradients to their mean; or, inside a `jax.shard_map` over
      these axes, of this device's gradients. Its state is that of the hook, empty without one.

    Raises:
      TypeError: gradients that are neither; one that something has computed with; what is no
        communication hook.
      ValueError: axis_name is None; no mesh, or another number of devices on it.

    Cost:
      One reduction a call, of each gradient byte once (scattered where `grad_specs` said so), and 4
      bytes of each different weight; or what the hook says.

    Example:
      >>> import jax, jax.numpy as jnp, optax, gradaccum
      >>> mesh = jax.make_mesh((8,), ("dp",))
      >>> grad_fn = gradaccum.unreduced_value_and_grad(
      ...     lambda w, x: jnp.mean(x * w), axis_name="dp", mesh=mesh, microbatches=2)
      >>> tx = optax.chain(gradaccum.all_reduce_mean("dp"), optax.sgd(1.0))
      >>> loss, grads = grad_fn(1.0, jnp.arange(16.0))
      >>> updates, state = tx.update(grads, tx.init(1.0))
      >>> float(updates)
      -7.5
    """
    api = "all_reduce_mean"
    _comm.check_hook(api, comm_hook)
    if axis_name is None:
        raise ValueError(f"{api}: axis_name is None; name the data axis or axes of the mesh.")
    axes = checked_axes(api, axis_name, mesh)
    assert axes is not None

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        given = read(api, updates, axes, mesh)
        assert given.where is not None  # as `axes` is not
        if not given.sums:
            return updates, state
        if comm_hook is not None:
            rows = _comm.unreduced_of(
                api,
                comm_hook,
                given.tree,
                given.sums,
                given.weights,
                given.awaited,
                axes,
                given.where,
            )
            return _comm.call(api, comm_hook, rows, state)
        grads = means(given.sums, given.weights, given.awaited, given.where)
        return given.tree.unflatten(grads), state

    def init(params: Any) -> Any:
        if comm_hook is None:
            return optax.EmptyState()
        leaves, tree = jax.tree.flatten(params)
        leaves = [jnp.asarray(x) for x in leaves]
        where = find_mesh(api, axes, mesh, leaves)
        dtypes = [accumulator_of(x.dtype, None) for x in leaves]
        state = _comm.init_state(api, comm_hook, leaves, tree, dtypes, axes, where)
        return settle(state, mesh_of(leaves, axes))

    return optax.GradientTransformation(init, update)


def checked_axes(api: str, axis_name: Any, mesh: Mesh | AbstractMesh | None) -> AxisName | None:
    """Returns data axes as hashable, checked against a mesh that was given."""
    _checks.check_axis_name(axis_name, api)
    if mesh is not None:
        _checks.check_mesh(mesh, api)
        check_axes(api, axis_name, mesh)
    axes: AxisName | None = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    return axes
