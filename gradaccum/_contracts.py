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


def check_reduced(reduced: Any, local: Any) -> None:
    """The sum over devices has the structure, shapes and dtypes of one device's part."""
    chex.assert_trees_all_equal_shapes_and_dtypes(reduced, local)


def check_parts(parts: Sequence[Any], wholes: Sequence[Any], layouts: Any, sizes: Any) -> None:
    """Each gradient is its whole, divided by the axes that it was scattered or cut along."""
    for part, whole, layout in zip(parts, wholes, layouts, strict=True):
        chex.assert_equal(part is None, whole is None)
        if whole is not None:
            shape = list(whole.shape)
            for dimension, axis in (*layout.scattered, *layout.sliced):
                shape[dimension] //= sizes[axis]
            chex.assert_shape(part, tuple(shape))
            chex.assert_type(part, whole.dtype)


def check_gradients(gradients: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Each gradient has its leaf's shape and dtype."""
    for g, leaf in zip(gradients, leaves, strict=True):
        chex.assert_shape(g, leaf.shape)
        chex.assert_type(g, leaf.dtype)


def check_state(after: Any, before: Any) -> None:
    """A state keeps its structure, shapes and dtypes: one program serves the whole run."""
    chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
