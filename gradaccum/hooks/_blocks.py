"""Blocks of int8 that share a scale, and the exchange of them between devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum._layout import Pairs

LARGEST = 127  # -128 is not used: the range is symmetric
SCALE_BYTES = 4
_TINY = float(np.finfo(np.float32).tiny)


class Quantised(NamedTuple):
    """Blocks in int8: an entry is value times scale.

    Attributes:
      values: int8 `[..., blocks, block]`.
      scales: float32 `[..., blocks]`: NaN of a block that held one, or an infinity; 0 of zeros.
    """

    values: jax.Array
    scales: jax.Array


def quantise(x: jax.Array, uniform: jax.Array | None = None) -> Quantised:
    """Rounds blocks `[..., blocks, block]` to steps of largest / 127, each its own.

    Args:
      x: float32 or wider.
      uniform: random numbers in [0, 1), as many: entries are rounded up with a probability that
        makes them right on average. None: to the nearest, off by half a step at most.
    """
    finite = jnp.all(jnp.isfinite(x), axis=-1)
    scale = (jnp.max(jnp.abs(x), axis=-1) / LARGEST).astype(jnp.float32)
    # Subnormal ones have few bits, or are 0 to this backend, which no number may be divided by.
    usable = finite & (scale >= _TINY)
    steps = x / jnp.where(usable, scale, 1)[..., None].astype(x.dtype)
    steps = jnp.round(steps) if uniform is None else jnp.floor(steps + uniform)
    # NaN has no int8: there the scale alone tells.
    steps = jnp.where(usable[..., None], jnp.clip(steps, -LARGEST, LARGEST), 0)
    scale = jnp.where(usable, scale, jnp.where(finite, 0, jnp.nan))
    return Quantised(steps.astype(jnp.int8), scale.astype(jnp.float32))


def dequantise(q: Quantised, dtype: Any) -> jax.Array:
    """Returns `[..., blocks, block]` in a float dtype."""
    return q.values.astype(dtype) * q.scales[..., None].astype(dtype)


def pack(parts: Sequence[Quantised]) -> jax.Array:
    """Lays blocks below each other, then scales: int8 `[..., rows, block]`.

    So one operation moves all. Rows of one length: a TPU moves them as they lie.
    """
    block = parts[0].values.shape[-1]
    scales = jnp.concatenate([q.scales for q in parts], axis=-1)
    lead, size = scales.shape[:-1], SCALE_BYTES * scales.shape[-1]
    flat = jax.lax.bitcast_convert_type(scales, jnp.int8).reshape(*lead, size)
    flat = jnp.concatenate([flat, jnp.zeros((*lead, -size % block), jnp.int8)], axis=-1)
    return jnp.concatenate(
        [*(q.values for q in parts), flat.reshape(*lead, -1, block)], axis=len(lead)
    )


def unpack(wire: jax.Array, blocks: Sequence[int]) -> list[Quantised]:
    """Returns what was packed, given the number of each part's blocks."""
    lead, total = wire.shape[:-2], sum(blocks)
    flat = wire[..., total:, :].reshape(*lead, -1)[..., : SCALE_BYTES * total]
    scales = jax.lax.bitcast_convert_type(flat.reshape(*lead, total, SCALE_BYTES), jnp.float32)
    ends = list(itertools.accumulate(blocks))
    return [
        Quantised(wire[..., end - n : end, :], scales[..., end - n : end])
        for n, end in zip(blocks, ends, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How a leaf is cut into one chunk a device, `[r, blocks, block]`: that which it sums.

    A device's chunk is the part of the leaf that its mean is scattered to, if it is; of the rest,
    which all devices are to have, an equal share of the flat array. Each chunk is padded to whole
    blocks.

    Attributes:
      shape: of the leaf.
      axes: the mesh axes and their sizes, the major one first; r is their product.
      scattered: the (dimension, axis) pairs that the mean is scattered along, the major axis of a
        dimension first.
      block: the entries of a block.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    scattered: Pairs
    block: int

    @property
    def count(self) -> int:
        """r, the devices."""
        return math.prod(n for _, n in self.axes)

    @property
    def rest(self) -> tuple[str, ...]:
        """The axes along which all devices are to have the mean."""
        return tuple(a for a, _ in self.axes if a not in self._split)

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of the mean on one device."""
        shape, sizes = list(self.shape), dict(self.axes)
        for dimension, a in self.scattered:
            shape[dimension] //= sizes[a]
        return tuple(shape)

    @property
    def blocks(self) -> int:
        """The blocks of a chunk."""
        return -(-math.prod(self.part) // (self._shares * self.block))

    @property
    def wire_bytes(self) -> int:
        """The bytes of all chunks, scales included."""
        return self.count * self.blocks * (self.block + SCALE_BYTES)

    @property
    def _split(self) -> tuple[str, ...]:
        return tuple(a for _, a in self.scattered)

    @property
    def _shares(self) -> int:
        return math.prod(n for a, n in self.axes if a not in self._split)

    def split(self, x: jax.Array) -> jax.Array:
        """Returns the chunks of a leaf `[*shape]`: `[r, blocks, block]`."""
        parts = x.reshape(self._cut_shape).transpose(self._cuts_first)
        parts = parts.reshape(-1, math.prod(self.part))
        blocks, block = self.blocks, self.block
        padding = self._shares * blocks * block - parts.shape[1]
        parts = jnp.pad(parts, ((0, 0), (0, padding)))
        return (
            parts.reshape(*self._by_cuts, blocks, block)
            .transpose(self._to_axes)
            .reshape(self.count, blocks, block)
        )

    def leaf(self, chunks: jax.Array) -> jax.Array:
        """Returns the leaf of chunks `[r, blocks, block]`: what `split` does, undone."""
        in_axes = chunks.reshape(*(n for _, n in self.axes), self.blocks, self.block)
        parts = in_axes.transpose(_inverse(self._to_axes))
        parts = parts.reshape(self.count // self._shares, -1)[:, : math.prod(self.part)]
        cut_shape = [self._cut_shape[i] for i in self._cuts_first]
        return parts.reshape(cut_shape).transpose(_inverse(self._cuts_first)).reshape(self.shape)

    def mean_part(self, shares: jax.Array) -> jax.Array:
        """Returns this device's part `[*part]` of shares `[r / scattered, blocks, block]`."""
        return shares.reshape(-1)[: math.prod(self.part)].reshape(self.part)

    @property
    def _cut_shape(self) -> tuple[int, ...]:
        """The leaf's shape, each cut dimension as its devices and what is left."""
        sizes, shape = dict(self.axes), []
        for dimension, size in enumerate(self.part):
            shape += [sizes[a] for d, a in self.scattered if d == dimension]
            shape.append(size)
        return tuple(shape)

    @property
    def _cuts_first(self) -> tuple[int, ...]:
        """The permutation of `_cut_shape` that puts devices first, in the order of `scattered`."""
        places: dict[str | int, int] = {}
        for dimension in range(len(self.shape)):
            for a in (a for d, a in self.scattered if d == dimension):
                places[a] = len(places)
            places[dimension] = len(places)
        return tuple(places[k] for k in (*self._split, *range(len(self.shape))))

    @property
    def _by_cuts(self) -> tuple[int, ...]:
        """The sizes of the axes, those that cut first."""
        sizes = dict(self.axes)
        return tuple(sizes[a] for a in (*self._split, *self.rest))

    @property
    def _to_axes(self) -> tuple[int, ...]:
        """The permutation from `_by_cuts`, blocks after it, to the order of the axes."""
        order = (*self._split, *self.rest)
        n = len(order)
        return (*(order.index(a) for a, _ in self.axes), n, n + 1)


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=lambda i: permutation[i]))


def summed(
    xs: Sequence[jax.Array],
    chunks: Sequence[Chunks],
    me: jax.Array,
    key: jax.Array | None,
    *,
    typed: bool,
    errors: bool,
) -> tuple[list[jax.Array], list[Any]]:
    """Sums leaves over devices: one all-to-all for all, and one all-gather for those not scattered.

    Args:
      xs: this device's leaves.
      chunks: of each, over the same axes.
      me: the index of this device along these.
      key: for stochastic rounding, this device's own.
      typed: values have varying axes.
      errors: whether the second result is wanted.

    Returns:
      This device's part of each sum, and `[*shape]` what it could not send of its own leaf, and of
      the sums that it added up; None if not wanted.
    """
    keys: Any = [(None, None)] * len(xs)
    if key is not None:
        keys = [jax.random.split(jax.random.fold_in(key, i)) for i in range(len(xs))]
    axes = tuple(a for a, n in chunks[0].axes if n > 1)
    split = [c.split(x) for c, x in zip(chunks, xs, strict=True)]
    sent = [_rounded(x, k[0]) for x, k in zip(split, keys, strict=True)]
    wire = jax.lax.all_to_all(pack(sent), axes, split_axis=0, concat_axis=0, tiled=True)
    received = unpack(wire, [c.blocks for c in chunks])
    sums = [jnp.sum(dequantise(q, x.dtype), axis=0) for q, x in zip(received, xs, strict=True)]
    shares = [s[None] for s in sums]
    lost: list[Any] = [None] * len(xs)
    for rest in dict.fromkeys(c.rest for c in chunks):
        group = [i for i, c in enumerate(chunks) if c.rest == rest]
        if not set(rest) & set(axes):  # scattered over all axes that have several devices
            for i in group if rest and typed else ():
                shares[i] = _gather(sums[i], rest, typed=typed)
            continue
        along = rest if typed else tuple(a for a in rest if a in axes)
        again = [_rounded(sums[i], keys[i][1]) for i in group]
        wire = _gather(pack(again), along, typed=typed)
        gathered = unpack(wire, [chunks[i].blocks for i in group])
        for i, own, q in zip(group, again, gathered, strict=True):
            shares[i] = dequantise(q, xs[i].dtype)
            lost[i] = sums[i] - dequantise(own, xs[i].dtype)
    totals = [c.mean_part(x) for c, x in zip(chunks, shares, strict=True)]
    if not errors:
        return totals, [None] * len(xs)
    kept = []
    for c, x, q, loss in zip(chunks, split, sent, lost, strict=True):
        error = x - dequantise(q, x.dtype)
        if loss is not None:
            mine = jnp.arange(c.count)[:, None, None] == me
            error = error + jnp.where(mine, loss[None], 0)
        kept.append(c.leaf(error))
    return totals, kept


def _gather(x: jax.Array, axes: tuple[str, ...], *, typed: bool) -> jax.Array:
    """Returns what all devices along axes have, `[devices, ...]`, the same on all of them."""
    to = {"to": "invarying"} if typed else {}
    gathered: jax.Array = jax.lax.all_gather(x[None], axes, axis=0, tiled=True, **to)
    return gathered


def _rounded(x: jax.Array, key: jax.Array | None) -> Quantised:
    return quantise(x, None if key is None else jax.random.uniform(key, x.shape, x.dtype))
