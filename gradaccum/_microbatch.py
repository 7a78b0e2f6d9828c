"""Splitting a batch into microbatches, padding it, and keys of their own; pure."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from gradaccum._arguments import is_array, is_key


def split(x: jax.Array, microbatches: int) -> jax.Array:
    """Splits `[k * b, ...]` into `[k, b, ...]`; rows keep their order."""
    return x.reshape((microbatches, x.shape[0] // microbatches, *x.shape[1:]))


def merge(x: jax.Array) -> jax.Array:
    """Joins `[k, b, ...]` to `[k * b, ...]`, and `[k]` to itself: the inverse of `split`."""
    return x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])) if x.ndim > 1 else x


def fold_key(key: jax.Array, index: jax.Array) -> jax.Array:
    """Folds the global microbatch index into a key, or into each of an array of keys."""
    batch_ndim = key.ndim if is_key(key) else key.ndim - 1
    fold = jax.random.fold_in
    for _ in range(batch_ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(key, index)


def pad_batch(batch: Any, multiple: int) -> tuple[Any, np.ndarray]:
    """Pad a ragged last batch on the host to the next multiple, and return the mask of real rows.

    Rows are added by repeating the last one, never as zeros: a loss may be infinite there, and an
    infinite value times a zero mask is NaN. The result is exact with a masked-mean loss *and* the
    mask's sum as `weight_fn`: `sum(mask * loss) / sum(mask)` over the whole batch.

    Args:
      batch: a pytree with leaves `[B, ...]`, B >= 1; rank-0 and non-array leaves stay as they are.
      multiple: what the new leading size must divide by: `microbatches * data devices`.

    Returns:
      `(batch, mask)`: leaves `[B', ...]`, where B' is B rounded up to `multiple`, as NumPy arrays
      (typed keys stay JAX arrays); mask float32 `[B']`, 1 for the B real rows, then 0.

    Raises:
      ValueError: `multiple < 1`, an empty batch, or leading sizes that disagree.

    Cost:
      One host copy of the batch; none if B already divides. No collective.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, gradaccum
      >>> batch, mask = gradaccum.pad_batch({"x": np.array([1.0, 2.0, 9.0])}, 4)
      >>> batch["x"].tolist(), mask.tolist()
      ([1.0, 2.0, 9.0, 9.0], [1.0, 1.0, 1.0, 0.0])
      >>> def loss_fn(w, batch, mask):
      ...     loss = (w * batch["x"]) ** 2
      ...     return jnp.sum(mask * loss) / jnp.sum(mask)
      >>> mean = gradaccum.accumulate(
      ...     loss_fn, microbatches=4, axis_name=None, batch_argnums=(1, 2),
      ...     weight_fn=lambda batch, mask: mask.sum())
      >>> print(f"{mean(1.0, batch, mask):.4f} = (1 + 4 + 81) / 3")
      28.6667 = (1 + 4 + 81) / 3
    """
    if isinstance(multiple, bool) or not isinstance(multiple, int | np.integer) or multiple < 1:
        raise ValueError(f"pad_batch: multiple is {multiple!r}; it must be an int >= 1.")
    leaves = [x for x in jax.tree.leaves(batch) if is_array(x) and np.ndim(x) > 0]
    sizes = sorted({x.shape[0] for x in leaves})
    if len(sizes) != 1 or sizes[0] == 0:
        raise ValueError(
            f"pad_batch: the leading sizes of the batch's leaves are {sizes}; "
            "all must be one size B >= 1. Leave out what is not per example."
        )
    size = sizes[0]
    padded = -(-size // multiple) * multiple
    rows = np.minimum(np.arange(padded), size - 1)

    def pad(x: Any) -> Any:
        if not is_array(x) or np.ndim(x) == 0:
            return x
        host = x if is_key(x) else np.asarray(x)
        return host if padded == size else host[rows]

    return jax.tree.map(pad, batch), (np.arange(padded) < size).astype(np.float32)
