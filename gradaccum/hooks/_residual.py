"""Residuals: what each device keeps of a gradient that it could not send, and how they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gradaccum._layout import Layout
from gradaccum._mesh import AxisName, DataMesh, axis_tuple, vary, varying_axes
from gradaccum._rows import zeros
from gradaccum._specs import Dims, dims_of, only, spec_of, without
from gradaccum._state import Residual
from gradaccum._unreduced import Unreduced, flatten, where_of


def compressed_axes(api: str, axis_name: AxisName | None, where: DataMesh) -> tuple[str, ...]:
    """Returns the data axes that a hook compresses on, in the order of the mesh's rows.

    Raises:
      ValueError: one is not among the data axes.
    """
    wanted = where.axis_names if axis_name is None else axis_tuple(axis_name)
    unknown = [a for a in wanted if a not in where.axis_names]
    if unknown and where.axis_names:
        raise ValueError(
            f"{api}: axis_name={axis_name!r}, but the gradients are unreduced over "
            f"{', '.join(map(repr, where.axis_names))}. Name the axes among these to compress on, "
            "or none for all."
        )
    return tuple(a for a in where.axis_names if a in wanted)


def zero_residual(api: str, axis_name: AxisName | None, unreduced: Any, has: Sequence[bool]) -> Any:
    """Returns a `Residual` of zeros `[r, *shape]`, laid out as the rows, for the leaves that `has`.

    On axes that are not compressed it is split as the mean is to be.
    """
    named, tree = flatten(api, unreduced)
    leaves = list(named.values())
    if not leaves:
        return Residual(tree.unflatten([]))
    where = where_of(api, leaves, leaves[0].axis_name, None)
    axes = compressed_axes(api, axis_name, where)
    rows = 1 if where.manual else math.prod(n for a, n in where.sizes if a in axes)
    zeros = [_zeros(x, rows, axes, where) if h else None for x, h in zip(leaves, has, strict=True)]
    return Residual(tree.unflatten(zeros))


def _zeros(x: Unreduced, rows: int, axes: tuple[str, ...], where: DataMesh) -> jax.Array:
    layout, dtype = x.awaited.layout, jnp.promote_types(x.sum.dtype, jnp.float32)
    if where.manual:
        shape = (rows, *_kept_shape(x, where, axes))
        return vary(jnp.zeros(shape, dtype), varying_axes(x.sum))
    placed = None if isinstance(x.sum, jax.core.Tracer) else x.sum.sharding
    named = placed if isinstance(placed, NamedSharding) else None
    own = dims_of(jax.typeof(x.sum).sharding.spec if named is None else named.spec)[1:]
    dims = merged(without(own, where.axis_names), residual_dims(layout, axes, where.axis_names))
    while dims and not dims[-1]:  # as a region's results are typed: a step is traced once
        dims = dims[:-1]
    shape = (rows, *x.sum.shape[1:])
    if named is not None:
        return jnp.zeros(shape, dtype, device=NamedSharding(named.mesh, spec_of([axes, *dims])))
    if where.explicit_axes:
        spec = spec_of(only((axes, *dims), where.explicit_axes))
        laid: jax.Array = jax.sharding.reshard(jnp.zeros(shape, dtype), _on(where, spec))
        return laid
    (zero,) = zeros([x.sum], [dtype])  # laid out as the rows are
    zero = zero.reshape(rows, -1, *x.sum.shape[1:])[:, 0]
    if not where.axis_names:
        return zero
    free: list[tuple[str, ...]] = [()] * (zero.ndim - 1 - len(dims))
    spec = spec_of([axes, *dims, *free], PartitionSpec.UNCONSTRAINED)
    return jnp.asarray(jax.lax.with_sharding_constraint(zero, _on(where, spec)))


def _on(where: DataMesh, spec: PartitionSpec) -> PartitionSpec | NamedSharding:
    return spec if where.mesh is None else NamedSharding(where.mesh, spec)


def _kept_shape(x: Unreduced, where: DataMesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Returns the shape of a residual's row: in a manual region, of what is left of the sum."""
    shape, sizes = list(x.sum.shape[1:]), dict(where.sizes)
    for dimension, a in x.awaited.layout.scattered if where.manual else ():
        shape[dimension] //= 1 if a in axes else sizes[a]
    return tuple(shape)


def merged(a: Dims, b: Dims) -> Dims:
    """Returns dimensions split over the axes of both."""
    size = max(len(a), len(b))
    a, b = ((*dims, *[()] * (size - len(dims))) for dims in (a, b))
    return tuple((*x, *(n for n in y if n not in x)) for x, y in zip(a, b, strict=True))


def residual_dims(layout: Layout, axes: Sequence[str], region: Sequence[str]) -> Dims:
    """Returns what splits a residual beside its rows: as its mean, but not by what comes later."""
    later = (*axes, *(a for _, a in layout.sliced))
    return only(without(layout.grad_dims, later), region)


def check_kept(
    api: str,
    paths: Sequence[str],
    leaves: Sequence[Unreduced],
    kept: Sequence[Any],
    where: DataMesh,
    axes: tuple[str, ...],
) -> None:
    """Raises ValueError if a residual is not one of these gradients."""
    rows = 1 if where.manual else math.prod(n for a, n in where.sizes if a in axes)
    bad = [
        f"{path}: {tuple(r.shape)}, needed {(rows, *_kept_shape(x, where, axes))}"
        for path, x, r in zip(paths, leaves, kept, strict=True)
        if r is not None and r.shape != (rows, *_kept_shape(x, where, axes))
    ]
    if bad:
        raise ValueError(
            f"{api}: the state holds residuals of other gradients: {'; '.join(bad)}. Rows are one "
            f"a device along {', '.join(map(repr, axes)) or 'no axis'}: move a state to another "
            "number of devices with MultiSteps.resize, or init it anew."
        )
