"""Sums over microbatches and devices become means: no communication."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from optax.microbatching import AccumulationType

from gradaccum._microbatch import merge
from gradaccum._reduce import Rows, Sums


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
