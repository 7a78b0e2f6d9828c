"""The one mean of rows: how it is taken, and the program that takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from gradaccum import _reduce
from gradaccum._layout import Layout, Layouts
from gradaccum._mesh import DataMesh
from gradaccum._shard import data_region, row_spec
from gradaccum._specs import dims_of, spec_of, without


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Awaited:
    """How the mean of an `Unreduced` is taken, and how it lies: known where the value was made.

    Attributes:
      dtype: of the mean; None: of the sum (float32 for integers).
      total: it is the sum over devices and calls instead, weights aside.
      reduce_dtype: on the wire; None: the sum's.
      scale: of the sum on the wire, about 1/weight: float16 would not hold the sum itself.
      layout: how the mean lies on the manual axes.
      manual: the model axes that are manual in the reduction.
      automatic: the other model axes.
      spec: how the mean lies on Explicit axes; None: as the sum's own type says.
      mesh: the mesh that was given; None: the context's.
    """

    dtype: Any = None
    total: bool = False
    reduce_dtype: Any = None
    scale: float = 1.0
    layout: Layout = Layout()  # noqa: RUF009 (immutable)
    manual: tuple[str, ...] = ()
    automatic: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    mesh: Mesh | AbstractMesh | None = None


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """All of a reduction but its arrays: hashable, a program's cache key."""

    where: DataMesh
    which: tuple[int, ...]
    awaited: tuple[Awaited, ...]

    def __call__(self, sums: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
        where, awaited = self.where, self.awaited
        manual = tuple(dict.fromkeys(a for x in awaited for a in x.manual))
        layouts = Layouts(
            tuple(x.layout for x in awaited),
            manual,
            tuple(dict.fromkeys(a for x in awaited for a in x.automatic)),
        )

        def local(sums: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
            return _reduce.mean_of_rows(
                [x[0] for x in sums],
                [w[0] for w in weights],
                [None if a.total else i for i, a in zip(self.which, awaited, strict=True)],
                where,
                layouts,
                [a.reduce_dtype for a in awaited],
                [a.scale if is_small(a.reduce_dtype) else 1.0 for a in awaited],
            )

        if where.axis_names and not where.manual:
            rows = [spec_of(x.layout.grad_dims) for x in awaited]
            local = data_region(
                local,
                where,
                manual,
                in_specs=([row_spec(where, s) for s in rows], PartitionSpec(where.axis_names)),
                out_specs=rows,
                out_types=[mean_type(x, a, where) for x, a in zip(sums, awaited, strict=True)],
            )
        values = local(sums, weights)
        return [cast(v, x, a) for v, x, a in zip(values, sums, awaited, strict=True)]


def mean_type(rows: jax.Array, awaited: Awaited, where: DataMesh) -> PartitionSpec:
    """Returns how the mean of rows lies on Explicit axes."""
    if awaited.spec is not None:
        return awaited.spec
    own = dims_of(jax.typeof(rows).sharding.spec)[1:]
    return spec_of(without(own, where.axis_names))


def is_small(dtype: Any) -> bool:
    """Whether sums may overflow in a dtype: in float16, not in bfloat16."""
    return dtype is not None and float(jnp.finfo(dtype).max) < 1e30  # type: ignore[no-untyped-call]


def cast(value: jax.Array, sums: jax.Array, awaited: Awaited) -> jax.Array:
    """Returns a mean in the dtype that it is awaited in."""
    if awaited.dtype is not None:
        return value.astype(awaited.dtype)
    # A mean of integers is none itself; their sum is.
    return value.astype(sums.dtype) if jnp.issubdtype(sums.dtype, jnp.inexact) else value


_reduced = jax.jit(lambda reduction, *arrays: reduction(*arrays), static_argnums=0)


def means(
    sums: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    awaited: Sequence[Awaited],
    where: DataMesh,
) -> list[jax.Array]:
    """Reduces rows to their means: the one communication.

    Args:
      sums: `[n, *shape]` each.
      weights: float32 `[n]`, one a sum; an array that several share is reduced once.
      awaited: how each mean is taken.
      where: the data axes.
    """
    different = list({id(w): w for w in weights}.values())
    places = {id(w): i for i, w in enumerate(different)}
    reduction = _Reduction(where, tuple(places[id(w)] for w in weights), tuple(awaited))
    if any(isinstance(x, jax.core.Tracer) for x in (*sums, *weights)):
        return reduction(list(sums), different)
    result: list[jax.Array] = _reduced(reduction, list(sums), different)
    return result
