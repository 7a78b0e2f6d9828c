"""The cross-device mean: the one place that communicates over the data axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum import _contracts
from gradaccum._layout import Layout, Layouts, Pairs
from gradaccum._mesh import DataMesh, is_typed, varying_axes
from gradaccum._specs import spec_of
from gradaccum._transpose import transposes


class Sums(NamedTuple):
    """What one device adds up over its microbatches; w is a microbatch's weight (1 without one).

    None stands where a leaf has nothing here: CONCAT aux, leaves that are not wanted.
    """

    loss: Any  # []: sum of w * loss; None beside rows
    weight: Any  # []: sum of w, where there are weights; of rows a list
    aux: list[Any]  # per aux leaf: the sum of w * aux (MEAN) or of aux (SUM)
    grads: list[Any]  # per array leaf, broadcast ones: the sum of scale * w * gradient


class Rows(NamedTuple):
    """What each microbatch leaves of its own, stacked along a leading axis of k."""

    aux: list[Any]  # per aux leaf: CONCAT ones
    grads: list[Any]  # per array leaf, batch ones: scale * w * gradient, [k, b, ...]


def sum_dtype(dtype: Any) -> Any:
    """Returns the dtype that values are summed in: float32 or int32 at least, never narrower."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.int32)


def narrow(dtype: Any, wanted: Any) -> Any:
    """Returns `wanted`, or its complex counterpart for a complex dtype; None changes nothing."""
    if wanted is None:
        return dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.promote_types(wanted, jnp.complex64)
    return wanted


def accumulator_of(dtype: Any, wanted: Any) -> Any:
    """Returns the dtype that gradients are accumulated in: float32 at least, or as wanted."""
    return jnp.promote_types(dtype, jnp.float32) if wanted is None else narrow(dtype, wanted)


def _same(x: Any, axis_names: tuple[str, ...]) -> Any:
    del axis_names
    return x


def _sum(x: Any, axis_names: tuple[str, ...]) -> Any:
    return jax.lax.psum(x, axis_names)


# A value that all devices share, and one that each has its own of, inside an untyped manual region:
# JAX does not know which is which there. `from_replicated` takes a shared one into each device's
# computation, so that its cotangents are summed; `replicated_sum` sums to a shared one, whose
# cotangent is shared too, and passed on as it is (Megatron's f and g).
from_replicated, replicated_sum = transposes(_same, _sum)


def gather(x: jax.Array, layout: Layout) -> jax.Array:
    """Gathers a leaf along the dimensions that it is split in: once, before the loop."""
    with jax.named_scope("gradaccum/gather"):
        for dimension, axis in layout.gathered:
            if x.shape[dimension]:  # XLA takes no empty one
                x = jax.lax.all_gather(x, axis, axis=dimension, tiled=True)
    return x


def _scatter(grads: Sequence[Any], layouts: Layouts) -> list[Any]:
    """Reduce-scatters the gradients that are to be; one operation per mesh axis.

    A `psum_scatter` over several axes at once becomes an all-reduce on larger TPU slices.
    """
    scattered = [
        g if layout.scattered else None for g, layout in zip(grads, layouts.leaves, strict=True)
    ]

    def scatter(scattered: list[Any]) -> list[Any]:
        parts = []
        for g, layout in zip(scattered, layouts.leaves, strict=True):
            for dimension, axis in layout.scattered if g is not None else ():
                if g.shape[dimension]:
                    g = jax.lax.psum_scatter(g, axis, scatter_dimension=dimension, tiled=True)
            parts.append(g)
        return parts

    if layouts.automatic:
        specs = [
            None if g is None else spec_of(layout.automatic)
            for g, layout in zip(scattered, layouts.leaves, strict=True)
        ]
        scatter = jax.shard_map(
            scatter,
            in_specs=(specs,),
            out_specs=specs,
            axis_names=set(layouts.automatic),
            check_vma=False,
        )
    parts = scatter(scattered) if jax.tree.leaves(scattered) else scattered
    return [g if p is None else p for g, p in zip(grads, parts, strict=True)]


def cut(g: jax.Array, pairs: Pairs) -> jax.Array:
    """Takes this device's part of an all-reduced gradient along (dimension, axis) pairs."""
    for dimension, axis in pairs:
        size = g.shape[dimension] // jax.lax.axis_size(axis)
        start = jax.lax.axis_index(axis) * size
        g = jax.lax.dynamic_slice_in_dim(g, start, size, dimension)
    return g


def _invariant(x: jax.Array, axis_name: str) -> jax.Array:
    """Returns a value that varies over an axis of one device as one that does not."""
    gathered: jax.Array = jax.lax.all_gather(x, axis_name, to="invarying")
    return gathered[0]


def _over(operation: Callable[..., Any], x: Any, names: tuple[str, ...], where: DataMesh) -> Any:
    """Applies a reduction to a tree, over those axes that have several devices.

    Beside an automatic axis XLA fails on one over an axis of one device. There, where values are
    typed, a gather changes the type and nothing else.
    """
    sizes = dict(where.sizes)
    for a in names if is_typed(where.axis_names) else ():
        if sizes[a] == 1:
            x = jax.tree.map(functools.partial(_invariant, axis_name=a), x)
    names = tuple(a for a in names if sizes[a] > 1)
    return operation(x, names) if names else x


def _psum(x: Any, names: tuple[str, ...]) -> Any:
    """Sums a tree; on CPUs beside an automatic axis bfloat16 as float32, as XLA does it elsewhere.

    By itself XLA would abort there (jax 0.10 and 0.12).
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = any(mesh.shape[a] > 1 for a in mesh.axis_names if a not in mesh.manual_axes)
    if not automatic or all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves(x)):
        return jax.lax.psum(x, names)

    def wide(x: Any) -> Any:
        whole = lambda y: y.astype(jnp.promote_types(y.dtype, jnp.float32))  # noqa: E731
        total = jax.lax.psum(jax.tree.map(whole, x), names)
        return jax.tree.map(lambda t, y: t.astype(y.dtype), total, x)

    return jax.lax.platform_dependent(
        x, cpu=wide, default=functools.partial(jax.lax.psum, axis_name=names)
    )


def largest(xs: list[jax.Array], where: DataMesh) -> list[jax.Array]:
    """Returns the largest of each over the data axes; a NaN counts as an infinity."""
    xs = [jnp.where(jnp.isnan(x), jnp.inf, x) for x in xs]  # not every backend's max passes it on
    found: list[jax.Array] = _over(jax.lax.pmax, xs, where.axis_names, where)
    return found


def reduce_sum(
    sums: Sums,
    where: DataMesh,
    layouts: Layouts,
    reduce_dtypes: Sequence[Any],
    *,
    replicated: bool = False,
) -> Sums:
    """Sums over the data axes, every byte once.

    The reduce-scatters come first. One psum sums what is summed over all data axes, loss and
    scalars too; one more for each set of axes that scattered gradients are still to be summed over.

    Args:
      sums: one device's sums.
      where: the data axes; with none, nothing is done.
      layouts: how each gradient is to lie.
      reduce_dtypes: each gradient's dtype on the wire, or None.
      replicated: use `replicated_sum`, beside `from_replicated` on the way in. Inside an untyped
        outer `shard_map` psum's own transpose would sum n equal copies of the cotangent. It
        matters for second derivatives only.
    """
    if not where.axis_names:
        return sums
    psum = functools.partial(_over, replicated_sum if replicated else _psum, where=where)
    with jax.named_scope("gradaccum/mean"):
        wire = [
            None if g is None else g.astype(narrow(g.dtype, dtype))
            for g, dtype in zip(sums.grads, reduce_dtypes, strict=True)
        ]
        parts = _scatter(wire, layouts)
        summed = [layout.summed(where.axis_names) for layout in layouts.leaves]

        def over(names: tuple[str, ...]) -> list[Any]:
            return [g if a == names else None for g, a in zip(parts, summed, strict=True)]

        total: Sums = psum(sums._replace(grads=over(where.axis_names)), names=where.axis_names)
        summed_over = {
            names: psum(over(names), names=names)
            for names in dict.fromkeys(summed)
            if names != where.axis_names
        }
        summed_over[where.axis_names] = total.grads
        grads = [summed_over[names][i] for i, names in enumerate(summed)]
        leaf = zip(grads, layouts.leaves, strict=True)
        grads = [None if g is None else cut(g, layout.sliced) for g, layout in leaf]
        _contracts.check_reduced(total._replace(grads=[]), sums._replace(grads=[]))
        _contracts.check_parts(grads, wire, layouts.leaves, dict(where.sizes))
        grads = jax.tree.map(lambda g, own: g.astype(own.dtype), grads, sums.grads)
    return total._replace(grads=grads)


def mean_of_rows(
    rows: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    which: Sequence[int | None],
    where: DataMesh,
    layouts: Layouts,
    reduce_dtypes: Sequence[Any],
    scales: Sequence[float],
) -> list[jax.Array]:
    """Takes the one mean of rows that were accumulated before.

    Args:
      rows: this device's sums.
      weights: what they add up to, float32 `[]` each.
      which: the place of each row's weight; None: no mean but the sum.
      where: the data axes.
      layouts: how each mean is to lie.
      reduce_dtypes: each row's dtype on the wire, or None.
      scales: what each row is multiplied by before it.
    """
    scaled = [
        g if s == 1 else g * jnp.asarray(s, g.dtype) for g, s in zip(rows, scales, strict=True)
    ]
    total = reduce_sum(Sums(None, list(weights), [], scaled), where, layouts, reduce_dtypes)
    return [
        g if i is None else quotient(g, total.weight[i], s)
        for g, i, s in zip(total.grads, which, scales, strict=True)
    ]


def quotient(x: jax.Array, weight: jax.Array, scale: float = 1.0) -> jax.Array:
    """Returns a sum over its weight times `scale`, in float32 at least; 0 where that is 0."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # a weight may overflow float16
    empty = weight == 0
    divisor = jnp.where(empty, 1, weight) * scale
    return jnp.where(empty, 0, wide / divisor.astype(wide.dtype))


def any_device(flag: jax.Array, where: DataMesh, *, split: bool) -> jax.Array:
    """Returns whether a flag that was computed from means is set on any device where it may differ.

    That is over manual model axes; over data axes only where they are manual and split the means.
    """
    others = tuple(a for a in where.manual_axes if split or a not in where.axis_names)
    if is_typed(others):
        others = tuple(a for a in others if a in varying_axes(flag))
    if not others:
        return flag
    with jax.named_scope("gradaccum/skip"):
        anywhere: jax.Array = jax.lax.pmax(flag.astype(jnp.int32), others) > 0
    return anywhere
