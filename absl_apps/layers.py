"""The layers that a model is written over, whole or sharded over a model axis: one model for both.

`PLAIN` computes on whole arrays, with JAX and optax alone; `sharded` on one device's shards, with
`gradaccum.tensor_parallel`. So a sharded model has an unsharded one to be compared with that shares
no line with it but the model itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradaccum import tensor_parallel


@dataclasses.dataclass(frozen=True)
class Layers:
    """The functions of a model in which sharding shows; hashable, so it may be a static argument.

    Attributes:
      embedding: (table [V, D], ids [...]) -> [..., D].
      column_dense: (x [..., D], w [D, F], b [F] or None) -> [..., F], sharded along F.
      row_dense: (x [..., F], w [F, D], b [D] or None) -> [..., D], summed along F.
      cross_entropy: (logits [..., V], targets [...], vocab_size) -> float32 losses [...]; the
        columns from vocab_size on are padding.
      split_sequence: what is whole -> this device's part of it along dimension 1; PLAIN, and
        without sequence parallelism, as it is.
      copy: a whole parameter that is used on such parts -> itself.
      axis_name: the model axis; None of PLAIN.
    """

    embedding: Callable[..., jax.Array]
    column_dense: Callable[..., jax.Array]
    row_dense: Callable[..., jax.Array]
    cross_entropy: Callable[..., jax.Array]
    split_sequence: Callable[[jax.Array], jax.Array]
    copy: Callable[[jax.Array], jax.Array]
    axis_name: str | None = None

    @property
    def shards(self) -> int:
        """The devices along the model axis, where one is manual; 1 of PLAIN."""
        return 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)


def sharded(axis_name: str, sequence_parallel: bool = False) -> Layers:
    """Return the layers for use inside a `shard_map` over a model axis.

    Args:
      axis_name: the model axis; weights, and heads, are sharded over it.
      sequence_parallel: between the dense layers, shard activations `[b, t, D]` along t.
    """
    of = tensor_parallel
    dimension = 1 if sequence_parallel else None
    return Layers(
        embedding=functools.partial(of.embedding, axis_name=axis_name),
        column_dense=functools.partial(
            of.column_dense, axis_name=axis_name, sequence_axis=dimension
        ),
        row_dense=functools.partial(of.row_dense, axis_name=axis_name, sequence_axis=dimension),
        cross_entropy=functools.partial(of.cross_entropy, axis_name=axis_name),
        split_sequence=functools.partial(of.scatter_to, axis_name=axis_name, axis=1)
        if sequence_parallel
        else _same,
        copy=functools.partial(of.copy_to, axis_name=axis_name) if sequence_parallel else _same,
        axis_name=axis_name,
    )


def _same(x: Any) -> Any:
    return x


def _embedding(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


def _dense(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    return x @ w if b is None else x @ w + jnp.expand_dims(b, range(x.ndim - 1))


def _cross_entropy(
    logits: jax.Array, targets: jax.Array, vocab_size: int | None = None
) -> jax.Array:
    wide = logits[..., :vocab_size].astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(wide, targets)


PLAIN = Layers(_embedding, _dense, _dense, _cross_entropy, _same, _same)
