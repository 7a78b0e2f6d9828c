"""What the built-in hooks share: a sum in full over some axes, an average over the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gradaccum import _reduce
from gradaccum._layout import Layout, Layouts, Pairs
from gradaccum._means import Awaited, cast, mean_type
from gradaccum._mesh import AxisName, DataMesh, axis_tuple, vary, varying_axes
from gradaccum._shard import data_region, row_spec
from gradaccum._specs import only, spec_of
from gradaccum._state import Residual
from gradaccum._unreduced import Unreduced, flatten, where_of
from gradaccum.hooks._residual import check_kept, compressed_axes, merged, residual_dims


class Local(NamedTuple):
    """One device's part of what a hook averages, inside the manual region.

    Attributes:
      sums: one array `[*shape]` a leaf: weight times value, summed over the axes that are not
        compressed (and scattered there, where its mean is to be).
      weights: float32 `[]`, each different one once.
      which: for each leaf the place of its weight; None: its sum is wanted, not its mean.
      where: the axes that are left, to compress on.
      layouts: what scatters and cuts are left over these axes.
      split: for each leaf the (dimension, axis) pairs that it is scattered along already, over
        axes that are not compressed.
    """

    sums: list[jax.Array]
    weights: list[jax.Array]
    which: tuple[int | None, ...]
    where: DataMesh
    layouts: Layouts
    split: tuple[Pairs, ...] = ()

    def weight_of(self, leaf: int) -> jax.Array:
        """This device's weight of a leaf."""
        i = self.which[leaf]
        return jnp.ones((), jnp.float32) if i is None else self.weights[i]

    def reduce(self, extra: Sequence[jax.Array | None], dtypes: Sequence[Any]) -> _reduce.Sums:
        """Sums some arrays, one a leaf or None, and all weights over the axes: one reduction."""
        own = _reduce.Sums(None, list(self.weights), [], list(extra))
        return _reduce.reduce_sum(own, self.where, self.layouts, dtypes)

    def divided(self, total: jax.Array, leaf: int, weights: Sequence[jax.Array]) -> jax.Array:
        """Returns a leaf's mean from its sum, and the sums of all weights, over all devices."""
        i = self.which[leaf]
        return total if i is None else _reduce.quotient(total, weights[i])


class Averaging(Protocol):
    """What a built-in hook does on one device."""

    @property
    def axis_name(self) -> AxisName | None:
        """The data axes to compress on; None: all."""

    manual_model_axes: ClassVar[bool]  # False: they are left to the partitioner

    def average(
        self, local: Local, residuals: list[Any], shared: Any
    ) -> tuple[list[jax.Array], list[Any], Any]:
        """Returns each leaf's mean, its new residual `[*shape]` (None without), and the rest."""


def is_compressible(x: Any) -> bool:
    """Whether rows `[n, *shape]` of a leaf can travel in another form: real, and no scalars."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating)) and x.ndim > 1


def check_axes(hook: Averaging, unreduced: Any) -> None:
    """Raises ValueError if a hook is to compress on an axis that is not among the data axes."""
    api = type(hook).__name__
    leaves = list(flatten(api, unreduced)[0].values())
    if leaves and hook.axis_name is not None:
        axes = axis_tuple(leaves[0].axis_name)
        compressed_axes(api, hook.axis_name, DataMesh(axis_names=axes))


def average(
    hook: Averaging, unreduced: Any, residual: Residual | None = None, shared: Any = ()
) -> tuple[Any, Residual | None, Any]:
    """Runs a hook on rows, in a manual region over the data axes: one, if there is none already.

    Args:
      hook: what is done on one device.
      unreduced: a tree of `Unreduced`.
      residual: what each device kept, or None.
      shared: the rest of the hook's state, the same on all devices.

    Returns:
      The tree of means, and both parts of the state.
    """
    api = type(hook).__name__
    named, tree = flatten(api, unreduced)
    if not named:
        return tree.unflatten([]), residual, shared
    leaves = list(named.values())
    where = where_of(api, leaves, leaves[0].axis_name, None)
    axes = compressed_axes(api, hook.axis_name, where)
    _check_scatters(api, list(named), leaves, where, axes)
    different = list({id(x.weight): x.weight for x in leaves}.values())
    places = {id(w): i for i, w in enumerate(different)}
    which = tuple(None if x.awaited.total else places[id(x.weight)] for x in leaves)
    run = _Run(hook, where, axes, which, tuple(x.awaited for x in leaves))
    none: list[Any] = [None] * len(leaves)
    kept = none if residual is None else tree.flatten_up_to(residual.rows)
    check_kept(api, list(named), leaves, kept, where, axes)
    arrays = ([x.sum for x in leaves], different, kept, shared)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))
    means, kept, shared = run(*arrays) if traced else _jitted(run, *arrays)
    return tree.unflatten(means), residual and Residual(tree.unflatten(kept)), shared


def _left(layout: Layout, axes: Sequence[str], automatic: Sequence[str], *, last: bool) -> Layout:
    """Returns a layout with its scatters over these axes, beside automatic ones; cuts come last."""
    return dataclasses.replace(
        layout,
        scattered=tuple(pair for pair in layout.scattered if pair[1] in axes),
        sliced=layout.sliced if last else (),
        automatic=merged(layout.automatic, only(layout.grad_dims, automatic)),
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """All of one call of a hook but its arrays: hashable, a program's cache key."""

    hook: Averaging
    where: DataMesh
    axes: tuple[str, ...]
    which: tuple[int | None, ...]
    awaited: tuple[Awaited, ...]

    def __call__(
        self, sums: list[jax.Array], weights: list[jax.Array], kept: list[Any], shared: Any
    ) -> tuple[list[jax.Array], list[Any], Any]:
        where, awaited = self.where, self.awaited
        local: Callable[..., Any] = self._local
        if where.axis_names and not where.manual:
            manual = self._manual
            region = (*where.axis_names, *manual)
            means = [spec_of(only(x.layout.grad_dims, region)) for x in awaited]
            residuals = [
                None
                if r is None
                else spec_of([self.axes, *residual_dims(x.layout, self.axes, region)])
                for r, x in zip(kept, awaited, strict=True)
            ]
            whole = PartitionSpec()
            local = data_region(
                local,
                where,
                manual,
                in_specs=(
                    [row_spec(where, s) for s in means],
                    PartitionSpec(where.axis_names),
                    residuals,
                    whole,
                ),
                out_specs=(means, residuals, whole),
                out_types=(
                    [mean_type(x, a, where) for x, a in zip(sums, awaited, strict=True)],
                    [None if r is None else jax.typeof(r).sharding.spec for r in kept],
                    jax.tree.map(lambda x: jax.typeof(x).sharding.spec, shared),
                ),
            )
        values, kept, shared = local(sums, weights, kept, shared)
        cast_means = [cast(v, x, a) for v, x, a in zip(values, sums, awaited, strict=True)]
        return self._placed(cast_means), kept, shared

    def _placed(self, means: list[jax.Array]) -> list[jax.Array]:
        """Lays means out over the model axes too, where the hook left these to the partitioner."""
        where = self.where
        if self.hook.manual_model_axes or where.manual or where.explicit_axes:
            return means
        placed = []
        for mean, x in zip(means, self.awaited, strict=True):
            dims = x.layout.grad_dims
            if any(a in x.manual for d in dims for a in d):
                free = PartitionSpec.UNCONSTRAINED
                spec = spec_of((*dims, *[()] * (mean.ndim - len(dims))), free)
                on = spec if where.mesh is None else NamedSharding(where.mesh, spec)
                mean = jax.lax.with_sharding_constraint(mean, on)
            placed.append(mean)
        return placed

    @property
    def _manual(self) -> tuple[str, ...]:
        if not self.hook.manual_model_axes:
            return ()
        return tuple(dict.fromkeys(a for x in self.awaited for a in x.manual))

    def _on(self, axes: tuple[str, ...]) -> DataMesh:
        sizes = dict(self.where.sizes)
        size = math.prod(sizes[a] for a in axes)
        return dataclasses.replace(self.where, axis_names=axes, size=size)

    def _local(
        self, sums: list[jax.Array], weights: list[jax.Array], kept: list[Any], shared: Any
    ) -> tuple[list[jax.Array], list[Any], Any]:
        rest = tuple(a for a in self.where.axis_names if a not in self.axes)
        automatic = tuple(dict.fromkeys(a for x in self.awaited for a in (*x.manual, *x.automatic)))
        automatic = tuple(a for a in automatic if a not in (*self._manual, *self.where.manual_axes))

        def layouts(axes: tuple[str, ...], *, last: bool) -> Layouts:
            each = tuple(_left(x.layout, axes, automatic, last=last) for x in self.awaited)
            return Layouts(each, self._manual, automatic)

        total = _reduce.Sums(None, [w[0] for w in weights], [], [x[0] for x in sums])
        if rest:
            exact = [None] * len(sums)
            total = _reduce.reduce_sum(total, self._on(rest), layouts(rest, last=False), exact)
        own = [None if r is None else r[0] for r in kept]
        where = self._on(self.axes)
        split = tuple(layout.scattered for layout in layouts(rest, last=False).leaves)
        left = layouts(self.axes, last=True)
        local = Local(total.grads, total.weight, self.which, where, left, split)
        means, new, shared_after = self.hook.average(local, own, shared)
        new = [None if r is None else as_before(x[None], r) for x, r in zip(new, kept, strict=True)]
        return means, new, jax.tree.map(as_before, shared_after, shared)


def as_before(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns a leaf of a state in its old dtype, varying over what it did."""
    return vary(new.astype(old.dtype), varying_axes(old))


_jitted = jax.jit(lambda run, *arrays: run(*arrays), static_argnums=0)


def _check_scatters(
    api: str,
    paths: Sequence[str],
    leaves: Sequence[Unreduced],
    where: DataMesh,
    axes: tuple[str, ...],
) -> None:
    """Raises ValueError for gradients that are scattered over both kinds of axes."""
    if set(axes) == set(where.axis_names):
        return
    bad = [
        f"{path} over {', '.join(map(repr, dict.fromkeys(a for _, a in x.awaited.layout.cut)))}"
        for path, x in zip(paths, leaves, strict=True)
        if {a for _, a in x.awaited.layout.cut} & set(axes)
    ]
    if bad:
        raise ValueError(
            f"{api}: axis_name={axes!r} is compressed alone, but gradients are to be split over it "
            f"too: {'; '.join(bad)}. Split them over the other data axes (HSDP), or leave "
            "axis_name out: then all data axes are compressed."
        )
