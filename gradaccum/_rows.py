"""Accumulators: zeros laid out as the parameters, one row a data device; and other meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from gradaccum._mesh import (
    AxisName,
    DataMesh,
    axis_tuple,
    is_typed,
    vary,
    varying_axes,
)
from gradaccum._shard import data_region, explicit_as_auto, row_spec
from gradaccum._specs import Dims, dims_of, only, spec_of, without
from gradaccum._state import MultiStepsState, Residual, has_rows


def settle(tree: Any, mesh: Mesh | None) -> Any:
    """Puts concrete arrays that lie nowhere in particular on the mesh, as a jitted step will.

    So the step's second call finds the types of the first.
    """
    if mesh is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    free = [
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.committed
        for x in leaves
    ]
    placed = iter(everywhere([x for x, is_free in zip(leaves, free, strict=True) if is_free], mesh))
    leaves = [next(placed) if is_free else x for x, is_free in zip(leaves, free, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def everywhere(values: Sequence[jax.Array], mesh: Mesh | AbstractMesh) -> Sequence[jax.Array]:
    """Places values that every process has on all devices of the mesh."""
    replicated = NamedSharding(mesh, PartitionSpec())
    if replicated.is_fully_addressable or not values:
        return [jnp.asarray(jax.device_put(x, replicated)) for x in values]
    # Between processes device_put compares the values, in a collective for each, and NaN differs
    # from itself; typed keys it refuses.
    placed: Sequence[jax.Array] = jax.jit(lambda x: x, out_shardings=replicated)(values)
    return placed


def _zero(x: jax.Array, dtype: Any, *, hidden: bool = True) -> jax.Array:
    # Not `zeros_like`: as a value of `x`, the partitioner lays the zeros out as it does `x`. Where
    # it is not `hidden`, the TPU's compiler knows the result before it lays anything out.
    never = jnp.zeros((), bool)
    never = jax.lax.optimization_barrier(never) if hidden else never
    zero = jnp.where(never, x, jnp.zeros((), x.dtype)).astype(dtype)
    return vary(zero, varying_axes(x))


def zeros(leaves: Sequence[jax.Array], dtypes: Sequence[Any]) -> list[jax.Array]:
    """Returns zeros of the leaves' shapes, laid out as they are."""
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return [_zero(x, d) for x, d in zip(leaves, dtypes, strict=True)]
    return [jnp.zeros_like(x, dtype=d) for x, d in zip(leaves, dtypes, strict=True)]


def zero_rows(
    leaves: Sequence[jax.Array], dtypes: Sequence[Any], where: DataMesh
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns zero rows `[n, *shape]`, laid out as the leaves otherwise; weights `[n]`."""
    where = explicit_as_auto(where, leaves)
    if any(isinstance(x, jax.core.Tracer) for x in leaves) or where.manual:
        return _zero_rows(where, tuple(dtypes), list(leaves))
    rows: tuple[list[jax.Array], list[jax.Array]]
    rows = _jitted_zero_rows(where, tuple(dtypes), list(leaves))
    return rows


def _zero_rows(
    where: DataMesh, dtypes: tuple[Any, ...], leaves: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    typed = where.axis_names if where.manual and is_typed(where.axis_names) else ()
    # Else there is nothing to follow, and leaves that are split over data axes need no gather.
    model = any(size > 1 for a, size in where.sizes if a not in where.axis_names)

    def local(leaves: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        rows = [_zero(x, d, hidden=model)[None] for x, d in zip(leaves, dtypes, strict=True)]
        return [vary(x, typed) for x in rows], [
            vary(jnp.zeros((1,), jnp.float32), typed) for _ in leaves
        ]

    if not where.axis_names or where.manual:
        return local(leaves)
    data = PartitionSpec(where.axis_names)
    region = data_region(
        local,
        where,
        (),
        in_specs=PartitionSpec(),
        out_specs=data,
        out_types=([row_spec(where, jax.typeof(x).sharding.spec) for x in leaves], data),
    )
    out: tuple[list[jax.Array], list[jax.Array]] = region(leaves)
    return out


_jitted_zero_rows = jax.jit(_zero_rows, static_argnums=(0, 1))


def resize(
    tree: Any,
    axis_name: AxisName | None,
    mesh: Mesh | AbstractMesh,
    compressed: AxisName | None = None,
) -> Any:
    """Moves a tree to a mesh: its states of `MultiSteps` to as many rows as that has.

    Args:
      tree: arrays, or shapes, and states.
      axis_name: the data axes of those that have rows.
      mesh: the mesh; abstract: for shapes on the mesh that the arrays lie on.
      compressed: the axes of residuals' rows; None: the data axes.
    """
    axes = axis_tuple(axis_name)
    rows = math.prod(mesh.shape[a] for a in axes)

    def is_state(x: Any) -> bool:
        return isinstance(x, MultiStepsState | Residual)

    def moved_residual(x: Any) -> Any:
        along = axes if compressed is None else axis_tuple(compressed)
        count = math.prod(mesh.shape[a] for a in along)
        sums = _moved(x, (count, *x.shape[1:]), along, mesh)
        # A mean's, not a sum's: equally weighted rows have the same mean as before.
        return sums if isinstance(sums, jax.ShapeDtypeStruct) else sums * (count / x.shape[0])

    def moved(x: Any) -> Any:
        return _moved(x, jnp.shape(x), None, mesh)

    def moved_row(x: Any) -> Any:
        return _moved(x, (rows, *x.shape[1:]), axes, mesh)

    def node(x: Any) -> Any:
        if isinstance(x, Residual):
            return Residual(jax.tree.map(moved_residual, x.rows))
        if not is_state(x):
            return moved(x)
        row = moved_row if has_rows(x) else moved
        rest = {
            name: walk(value)
            for name, value in x._asdict().items()
            if name not in ("acc_grads", "weight")
        }
        sums, weight = jax.tree.map(row, (x.acc_grads, x.weight))
        return x._replace(acc_grads=sums, weight=weight, **rest)

    def walk(tree: Any) -> Any:
        return jax.tree.map(node, tree, is_leaf=is_state)

    return walk(tree)


def _moved(
    x: Any, shape: tuple[int, ...], axes: tuple[str, ...] | None, mesh: Mesh | AbstractMesh
) -> Any:
    """Returns `x` with as many rows as `shape` has, on the mesh, split by its own spec otherwise.

    `axes` are those of the rows; None: there are none, the shape is its own.
    """
    if isinstance(x, jax.core.Tracer):
        return x if axes is None else _resized(x, shape[0])
    sharding = getattr(x, "sharding", None)
    here = sharding if isinstance(sharding, NamedSharding) else None
    target = here.mesh if here is not None and isinstance(mesh, AbstractMesh) else mesh
    dims = dims_of(here.spec if here is not None else PartitionSpec())
    if axes is not None:
        dims = (axes, *without(dims[1:], axes))
    to = None
    if isinstance(target, Mesh):
        to = NamedSharding(target, _fitting(dims, shape, target))
    if isinstance(mesh, AbstractMesh) or isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=to)
    if axes is not None:
        if here is not None:  # as Auto, where shapes may change
            auto = Mesh(here.mesh.devices, here.mesh.axis_names)
            x = jax.device_put(x, NamedSharding(auto, here.spec))
        x = _resized(x, shape[0])
    return jax.device_put(x, to)


def _fitting(dims: Dims, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the spec of those dimensions that the mesh's axes divide."""
    dims = only((*dims, *[()] * (len(shape) - len(dims))), mesh.axis_names)
    return spec_of(
        [
            d if size % math.prod(mesh.shape[a] for a in d) == 0 else ()
            for d, size in zip(dims, shape, strict=True)
        ]
    )


def _resized(x: jax.Array, rows: int) -> jax.Array:
    """Returns as many rows with the same sum: neighbours added, or zero rows between."""
    old = x.shape[0]
    rest = [(0, 0)] * (x.ndim - 1)
    if old < rows and rows % old == 0:
        spread = jnp.pad(x[:, None], [(0, 0), (0, rows // old - 1), *rest])
        return spread.reshape(rows, *x.shape[1:])
    group = -(-old // rows)
    padded = jnp.pad(x, [(0, group * rows - old), *rest])
    return padded.reshape(rows, group, *x.shape[1:]).sum(1)
