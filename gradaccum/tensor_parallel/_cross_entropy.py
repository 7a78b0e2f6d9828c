"""Cross entropy of logits whose vocabulary is sharded over a model axis."""

from __future__ import annotations

import numbers
import operator
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gradaccum._mesh import AxisName, vary
from gradaccum.tensor_parallel._axes import check_operand, check_sharded, padded
from gradaccum.tensor_parallel._operators import reduce_from


def cross_entropy(
    logits: ArrayLike,
    targets: ArrayLike,
    axis_name: AxisName,
    *,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> jax.Array:
    """Return the cross entropy of each target, from this device's columns of the logits.

    With s the smoothing, `log Z = log sum_v exp(l_v)` over the whole vocabulary of V columns:

        loss = log Z - (1 - s) l_target - s mean_v(l_v) + z_loss (log Z)^2

    The logits never meet on one device: the maximum over all devices is subtracted, then sums of
    each device's columns are added up. A target outside `[0, V)` is ignored: its loss is 0, and its
    logits, whatever they are, get no gradient.

    Args:
      logits: `[..., V/m]`, any float dtype, this device's columns: device i of m holds those from
        `i V/m`. What `column_dense` returns.
      targets: `[...]`, integers of any width, global ids, the same on all devices.
      axis_name: the manual mesh axis, or a tuple of them, that the vocabulary is sharded over.
      where: booleans that broadcast to `[...]`; a target is ignored where it is False.
      label_smoothing: s in [0, 1], over the whole vocabulary, the target included, as in optax.
      z_loss: the weight >= 0 of the squared log partition function.
      vocab_size: V, where the logits have been padded to a multiple of m: their columns from V on
        take no part. None: all of them are the vocabulary.

    Returns:
      `[...]` losses in nats, float32 (float64 for float64 logits), the same on all devices. Their
      mean over what counts is `losses.sum() / count`, the count yours.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here; the shapes do
        not match; a number is out of range; vocab_size is more than the logits have (the message
        names the size to pad to), or all of it is on one device, so that the logits have been
        gathered; with `check_vma=True`, logits are the same on all devices.
      TypeError: logits are no floats, targets no integers, where no booleans.

    Cost:
      Forward one all-reduce (maximum) of `[...]` and one (sum) of `[2, ...]`, or `[3, ...]` with
      label_smoothing, in float32; backward none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import cross_entropy
      >>> mesh = jax.make_mesh((8,), ("mp",), (AxisType.Auto,))
      >>> specs = dict(in_specs=(P(None, "mp"), P()), out_specs=P(), check_vma=False)
      >>> f = jax.shard_map(lambda l, t: cross_entropy(l, t, "mp"), mesh=mesh, **specs)
      >>> f(jnp.zeros((2, 16)), jnp.array([3, -1]))  # log(16), and an ignored target
      Array([2.7725887, 0.       ], dtype=float32)

    References:
      Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, section 3; Chowdhery et al.,
      PaLM, https://arxiv.org/abs/2204.02311, section 5 (z-loss).
    """
    logits, axes = check_operand("cross_entropy", logits, axis_name)
    targets = jnp.asarray(targets)
    counts = _check(logits, targets, where, axes)
    _check_weights(label_smoothing=(label_smoothing, 1.0), z_loss=(z_loss, sys.float_info.max))
    size = logits.shape[-1]
    whole = size * jax.lax.axis_size(axes)
    vocabulary = whole if vocab_size is None else _check_vocabulary(vocab_size, logits, axes)

    targets = targets.astype(jnp.promote_types(targets.dtype, jnp.int32))
    counts = counts & (targets >= 0) & (targets < vocabulary)
    column = jax.lax.axis_index(axes) * size + jax.lax.iota(jnp.int32, size)
    column = jnp.expand_dims(column, range(targets.ndim))
    real = column < vocabulary

    def selected(logits: jax.Array) -> jax.Array:
        # Before anything is computed: NaN logits of an ignored target leave no gradient.
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        wide = jnp.where(counts[..., None], vary(wide, axes), 0)
        return jnp.where(real, wide, -jnp.inf) if vocabulary < whole else wide

    def local_sums(logits: jax.Array) -> jax.Array:
        shifted = selected(logits) - highest[..., None]
        parts = [jnp.exp(shifted), jnp.where(column == targets[..., None], shifted, 0)]
        if label_smoothing:
            parts.append(jnp.where(real, shifted, 0))
        return jnp.stack([jnp.sum(part, axis=-1) for part in parts])

    with jax.named_scope("gradaccum/cross_entropy"):
        # The loss does not depend on what is subtracted, so nothing is differentiated through it.
        highest = jnp.max(selected(jax.lax.stop_gradient(logits)), axis=-1)
        highest = jax.lax.pmax(highest, axes)
        # Recomputed, or each selection would keep a mask and a float32 copy of the logits. There is
        # nothing to keep XLA from merging the two where that costs no memory.
        sums = reduce_from(jax.checkpoint(local_sums, prevent_cse=False)(logits), axes)
        log_sum = jnp.log(sums[0])
        losses = log_sum - (1 - label_smoothing) * sums[1]
        if label_smoothing:
            losses -= label_smoothing / vocabulary * sums[2]
        if z_loss:
            losses += z_loss * (log_sum + highest) ** 2
        return jnp.where(counts, losses, 0)


def _check(
    logits: jax.Array, targets: jax.Array, where: ArrayLike | None, axes: tuple[str, ...]
) -> jax.Array:
    """Returns the mask, `[...]`."""
    where = jnp.ones((), bool) if where is None else jnp.asarray(where)
    for name, x, kind, needed in (
        ("logits", logits, jnp.floating, "floats"),
        ("targets", targets, jnp.integer, "integers: global ids"),
        ("where", where, jnp.bool_, "booleans; to weigh targets, multiply the returned losses"),
    ):
        if not jnp.issubdtype(x.dtype, kind):
            raise TypeError(f"cross_entropy: got {name} of dtype {x.dtype}, needed {needed}.")
    if logits.ndim < 1 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: got logits {logits.shape} and targets {targets.shape}, needed logits "
            "[..., V/m], this device's columns, and targets [...], one id each."
        )
    try:
        mask = jnp.broadcast_to(where, targets.shape)
    except ValueError:
        raise ValueError(
            f"cross_entropy: where has shape {where.shape}, which does not broadcast to the "
            f"targets' {targets.shape}. Give one boolean a target."
        ) from None
    check_sharded("cross_entropy", "logits", logits, axes, "columns of the vocabulary")
    return mask


def _check_weights(**weights: tuple[Any, float]) -> None:
    for name, (value, most) in weights.items():
        if not isinstance(value, numbers.Real) or not 0 <= float(value) <= most:
            limit = f" and <= {most:g}" if most == 1 else ", and finite"
            raise ValueError(
                f"cross_entropy: {name} is {value!r}; it must be a number >= 0{limit}."
            )


def _check_vocabulary(vocab_size: Any, logits: jax.Array, axes: tuple[str, ...]) -> int:
    m, size = jax.lax.axis_size(axes), logits.shape[-1]
    if not isinstance(vocab_size, numbers.Integral) or (V := operator.index(vocab_size)) < 1:
        raise ValueError(f"cross_entropy: vocab_size is {vocab_size!r}; it must be an int >= 1.")
    here = (
        f"cross_entropy: got logits with {size} columns on each of {m} devices, {m * size} in all, "
        f"for vocab_size={V}"
    )
    if m * size < V:
        raise ValueError(
            f"{here}. Pad the vocabulary to {padded(V, m)}: {padded(V, m) // m} columns a device."
        )
    if m > 1 and size >= V > 1:
        raise ValueError(
            f"{here}: one device has all of it. Give this device's columns, before any gather; or "
            "leave out vocab_size if it is not the whole one."
        )
    return V
