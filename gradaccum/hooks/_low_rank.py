"""Batches of matrices and their low-rank factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum import _reduce
from gradaccum._layout import Layout, Layouts, Pairs
from gradaccum._mesh import vary, varying_axes
from gradaccum._state import zeros_of
from gradaccum.hooks._averaging import Local


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `a @ b` in their own precision, also where a TPU or GPU would round to fewer bits."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _tiny(dtype: Any) -> float:
    return float(jnp.finfo(dtype).tiny)  # type: ignore[no-untyped-call]


def _unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns columns `[..., n, 1]` of norm 1, and their norms; zeros where that is (nearly) 0."""
    # Scaled first: the squares of gradients under- and overflow long before they do.
    largest = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
    none = largest < _tiny(x.dtype)
    x = jnp.where(none, 0, x / jnp.where(none, 1, largest))
    norm = jnp.sqrt(jnp.sum(x * x, axis=-2, keepdims=True))
    return x / jnp.where(none, 1, norm), jnp.where(none, 0, norm * largest)


def orthonormal(xs: Sequence[jax.Array], rank: jax.Array | int) -> list[jax.Array]:
    """Returns orthonormal bases of the columns of batches of matrices.

    Columns that depend on those before them are 0; a NaN or infinity makes its matrix NaN. Unlike
    a QR decomposition it is matrix products alone: of matrices that are split over automatic axes
    the partitioner sums r numbers a column, and gathers none. One loop for all of them: so each
    basis needs all of `xs`, and XLA cannot send what is made of some together with others.

    Args:
      xs: `[..., n, r]` each, float32 or wider.
      rank: r, the same for all.

    Returns:
      The same shapes.
    """

    def next_column(i: jax.Array, bases: list[jax.Array]) -> list[jax.Array]:
        return [_with_column(i, x, basis) for x, basis in zip(xs, bases, strict=True)]

    bases = jax.lax.fori_loop(0, rank, next_column, [zeros_of(jax.typeof(x)) for x in xs])
    return [jnp.where(_is_finite(x), b, jnp.nan) for x, b in zip(xs, bases, strict=True)]


def _with_column(i: jax.Array, x: jax.Array, basis: jax.Array) -> jax.Array:
    """Returns a basis of i columns with one more."""
    # Of a column of norm 1, what rounding leaves of one that depends on those before it.
    rounding = 64 * _eps(x.dtype)
    v, _ = _unit(jax.lax.dynamic_slice_in_dim(x, i, 1, axis=-1))
    for _ in range(2):  # Gram-Schmidt, twice: then as orthogonal as numbers can be
        v = v - product(basis, product(basis.mT, v))
        v, norm = _unit(v)
        v = jnp.where(norm < rounding, 0, v)
    return jax.lax.dynamic_update_slice_in_dim(basis, v, i, axis=-1)


def _unit_columns(x: jax.Array, instead: jax.Array) -> jax.Array:
    """Returns the columns `[..., m, r]` at norm 1; where one vanished, that of `instead`."""
    units, norms = _unit(x)
    return jnp.where(norms > 0, units, instead)


def random_columns(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws columns `[..., m, r]`, float32, of about norm 1."""
    return jax.random.normal(key, shape, jnp.float32) / jnp.sqrt(jnp.float32(shape[-2]))


def _is_finite(x: jax.Array) -> jax.Array:
    """Whether a whole matrix is: bool `[..., 1, 1]`."""
    return jnp.all(jnp.isfinite(x), axis=(-2, -1), keepdims=True)


def next_factor(factor: jax.Array, drawn: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the right factors to begin with next: the old ones, where there was no gradient."""
    new = _unit_columns(factor, drawn.astype(factor.dtype))
    known = _is_finite(factor) & jnp.any(factor != 0, axis=(-2, -1), keepdims=True)
    return jnp.where(known, new, old.astype(factor.dtype))


class Side(NamedTuple):
    """How the factors of a matrix that is split over axes which are not compressed come together.

    Attributes:
      pairs: the (dimension, axis) pairs that this device's factor is a part along.
      axes: those to sum over, parts in their places.
    """

    pairs: Pairs
    axes: tuple[str, ...]


class Matrix:
    """This device's part of one leaf: M = sum / weight + residual, a batch of matrices."""

    def __init__(self, local: Local, leaf: int, residual: jax.Array | None):
        x = local.sums[leaf]
        self.x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        self.weight = local.weight_of(leaf)
        self.residual = residual
        # Its weight times M: what is summed.
        w = self.weight.astype(self.x.dtype)
        self.weighted = self.x if residual is None else self.x + w * residual
        self.whole = whole_shape(local, leaf)
        rows, columns = x.ndim - 2, x.ndim - 1
        split = local.split[leaf]
        self.of_left = Side(
            tuple((d, a) for d, a in split if d == rows),
            tuple(a for d, a in split if d in (rows, columns)),
        )
        self.of_right = Side(
            tuple((min(d, rows), a) for d, a in split if d != rows), tuple(a for _, a in split)
        )

    def factor_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of the whole right factors."""
        return (*self.whole[:-2], self.whole[-1], rank)

    def times(self, q: jax.Array) -> jax.Array:
        """Returns this device's part of weight * M Q."""
        part = _reduce.cut(q.astype(self.x.dtype), self.of_right.pairs)
        return product(self.weighted, part)

    def transposed_times(self, basis: jax.Array) -> jax.Array:
        """Returns its part of weight * M^T P."""
        return product(self.weighted.mT, _reduce.cut(basis, self.of_left.pairs))

    def mean(self, basis: jax.Array, factor: jax.Array) -> jax.Array:
        """Returns its part of P Q'^T."""
        left = _reduce.cut(basis, self.of_left.pairs)
        return product(left, _reduce.cut(factor, self.of_right.pairs).mT)

    def left_over(self, mean: jax.Array) -> jax.Array | None:
        """Returns M less what was sent; what it was before without a weight, or not finite."""
        if self.residual is None:
            return None
        new = _reduce.quotient(self.x, self.weight) + self.residual - mean
        return jnp.where((self.weight != 0) & jnp.isfinite(new), new, self.residual)


def whole_shape(local: Local, leaf: int) -> tuple[int, ...]:
    shape, sizes = list(local.sums[leaf].shape), dict(local.where.sizes)
    for dimension, a in local.split[leaf]:
        shape[dimension] *= sizes[a]
    return tuple(shape)


def completed(
    local: Local, factors: Sequence[jax.Array | None], sides: dict[int, Side]
) -> list[Any]:
    """Puts the factors of split matrices together: small sums over axes that are not compressed."""
    whole: list[Any] = list(factors)
    sizes = dict(local.where.sizes)
    plain = Layouts(tuple(Layout() for _ in factors), local.layouts.manual, ())
    for axes in dict.fromkeys(side.axes for side in sides.values() if side.axes):
        mine = [i for i, side in sides.items() if side.axes == axes]
        parts: list[Any] = [None] * len(whole)
        for i in mine:
            parts[i] = _in_place(whole[i], sides[i].pairs, sizes)
        on = dataclasses.replace(
            local.where, axis_names=axes, size=math.prod(sizes[a] for a in axes)
        )
        summed = _reduce.reduce_sum(
            _reduce.Sums(None, [], [], parts), on, plain, [None] * len(parts)
        )
        for i in mine:
            whole[i] = summed.grads[i]
    return whole


def _in_place(x: jax.Array, pairs: Pairs, sizes: dict[str, int]) -> jax.Array:
    """Returns zeros with this device's part at its place: of all devices they sum to the whole."""
    for dimension, a in reversed(pairs):
        shape, size = list(x.shape), x.shape[dimension]
        shape[dimension] *= sizes[a]
        zeros = vary(jnp.zeros(shape, x.dtype), varying_axes(x))
        start = jax.lax.axis_index(a) * size
        x = jax.lax.dynamic_update_slice_in_dim(zeros, x, start, dimension)
    return x
