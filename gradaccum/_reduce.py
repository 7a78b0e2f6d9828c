"""The cross-device mean: the one place that communicates over the data axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax.microbatching import AccumulationType

from gradaccum import _contracts
from gradaccum._mesh import DataMesh
from gradaccum._microbatch import merge


class Sums(NamedTuple):
    """What one device adds up over its microbatches; w is a microbatch's weight (1 without one).

    None stands where a leaf has nothing here: CONCAT aux, leaves that are not wanted.
    """

    loss: jax.Array  # []: sum of w * loss
    weight: jax.Array | None  # []: sum of w, where there are weights
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


# A value that all data devices share, and one that each has its own of, inside an untyped manual
# region: JAX does not know which is which there. The two are each other's transpose (Megatron's f
# and g), and their rules call themselves, so that derivatives of any order are right.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def from_replicated(x: Any, axis_names: tuple[str, ...]) -> Any:
    """Takes a shared value into one device's computation: its cotangents are summed."""
    del axis_names
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _replicated_sum(x: Any, axis_names: tuple[str, ...]) -> Any:
    """Sums over devices to a shared value: its cotangent is shared too, and passed on as it is."""
    return jax.lax.psum(x, axis_names)


from_replicated.defvjp(
    lambda x, axis_names: (from_replicated(x, axis_names), None),
    lambda axis_names, _, ct: (_replicated_sum(ct, axis_names),),
)
_replicated_sum.defvjp(
    lambda x, axis_names: (_replicated_sum(x, axis_names), None),
    lambda axis_names, _, ct: (from_replicated(ct, axis_names),),
)


def all_reduce_sum(
    sums: Sums, where: DataMesh, reduce_dtype: Any, *, replicated: bool = False
) -> Sums:
    """Sums over the data axes with one psum; gradients travel in `reduce_dtype`.

    Args:
      sums: one device's sums.
      where: the data axes; with none, nothing is done.
      reduce_dtype: the dtype on the wire, or None.
      replicated: use `_replicated_sum`, beside `from_replicated` on the way in. Inside an untyped
        outer `shard_map` psum's own transpose would sum n equal copies of the cotangent. It
        matters for second derivatives only.
    """
    if not where.axis_names:
        return sums
    psum: Callable[..., Any] = _replicated_sum if replicated else jax.lax.psum
    with jax.named_scope("gradaccum/mean"):
        wire = sums._replace(
            grads=jax.tree.map(lambda g: g.astype(narrow(g.dtype, reduce_dtype)), sums.grads)
        )
        total: Sums = psum(wire, where.axis_names)
        _contracts.check_reduced(total, wire)
        grads = jax.tree.map(lambda t, g: t.astype(g.dtype), total.grads, sums.grads)
        total = total._replace(grads=grads)
    return total


def normalise(
    total: Sums,
    rows: Rows,
    *,
    aux_types: Sequence[AccumulationType],
    loss_reduction: str,
    count: int,
) -> tuple[Sums, Rows]:
    """Turns sums over microbatches and devices into means.

    The loss is `sum(w * loss) / sum(w)`; without weights sum(w) is the count k * n, and 1 for a
    loss that is itself a sum. MEAN aux always is a mean. Nothing but zeros where sum(w) = 0.

    Args:
      total: the sums, over all devices.
      rows: this device's rows.
      aux_types: how each aux leaf is accumulated.
      loss_reduction: "mean" or "sum".
      count: k * n. Without weights the gradients have been divided by it already.

    Returns:
      The same structures: loss, MEAN aux and gradients as means, rows `[k * b, ...]`.
    """
    mean_factor = jnp.asarray(1 / count, total.loss.dtype)
    if total.weight is not None:
        empty = total.weight == 0
        mean_factor = jnp.where(empty, 0, 1 / jnp.where(empty, 1, total.weight))
    loss = total.loss if loss_reduction == "sum" else total.loss * mean_factor

    def scale(g: jax.Array) -> jax.Array:
        return g if total.weight is None else g * mean_factor.astype(g.dtype)

    aux = [
        x if x is None or kind is AccumulationType.SUM else x * mean_factor.astype(x.dtype)
        for kind, x in zip(aux_types, total.aux, strict=True)
    ]
    rows = jax.tree.map(merge, rows)
    means = total._replace(loss=loss, aux=aux, grads=jax.tree.map(scale, total.grads))
    return means, rows._replace(grads=jax.tree.map(scale, rows.grads))
