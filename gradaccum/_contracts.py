"""What one part of gradaccum promises another, checked with chex on every trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chex
import jax.numpy as jnp


def check_microbatches(leaves: Sequence[Any], k: int, size: int) -> None:
    """The split batch is `[k, b, ...]` in every leaf."""
    for x in leaves:
        chex.assert_axis_dimension(x, 0, k)
        chex.assert_axis_dimension(x, 1, size // k)


def check_scalars(loss: Any, weight: Any) -> None:
    """Loss and weight of a microbatch are scalars, the weight in the loss's sum's dtype."""
    chex.assert_shape([loss, weight], ())
    chex.assert_type(weight, jnp.promote_types(loss.dtype, jnp.float32))


def check_accumulators(accumulators: Sequence[Any], leaves: Sequence[Any], dtypes: Any) -> None:
    """Each accumulator has its leaf's shape and its accumulator dtype."""
    chex.assert_equal(len(accumulators), len(leaves))
    for acc, leaf, dtype in zip(accumulators, leaves, dtypes, strict=True):
        chex.assert_shape(acc, leaf.shape)
        chex.assert_type(acc, dtype)


def check_scattered(parts: Any, wholes: Any, layouts: Sequence[Any], sizes: Any) -> None:
    """Each part is its whole, divided by the axes that it was scattered along."""
    for part, whole, layout in zip(parts, wholes, layouts, strict=True):
        if whole is not None:
            shape = list(whole.shape)
            for dimension, axis in layout.scattered:
                shape[dimension] //= sizes[axis]
            chex.assert_shape(part, tuple(shape))
            chex.assert_type(part, whole.dtype)


def check_gradients(gradients: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Each gradient has its leaf's shape and dtype."""
    for g, leaf in zip(gradients, leaves, strict=True):
        chex.assert_shape(g, leaf.shape)
        chex.assert_type(g, leaf.dtype)
