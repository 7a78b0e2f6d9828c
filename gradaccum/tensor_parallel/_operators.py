"""The four operators between replicated values and values that each model device has its own of.

In the equations below device i of m holds x_i, or its own copy of a shared X; a bar marks a
cotangent. With `check_vma=True` JAX's types know which is which, and transposes come out right.
With `check_vma=False` they do not: the transpose of a plain `psum` sums m equal cotangents. There
each operator brings its own backward rule, for gradients taken inside the `shard_map`. From
outside, `shard_map` itself divides the cotangent of a replicated output by m: that suits a plain
`psum` alone.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from gradaccum._mesh import AxisName, is_typed, vary, varying_axes
from gradaccum._reduce import from_replicated, replicated_sum
from gradaccum._transpose import transposes
from gradaccum.tensor_parallel._axes import check_operand, check_splits, dimension_of

_SCOPE = "gradaccum/tensor_parallel"


def copy_to(x: ArrayLike, axis_name: AxisName) -> jax.Array:
    """Take a replicated value into sharded computation (Megatron's f).

    Forward `y_i = X`, backward `X_bar = sum_i y_bar_i`: each device's computation uses all of X,
    so each contributes to its gradient. It belongs at the entrance of sharded computation, once on
    each path: on activations before column-sharded weights, on replicated parameters that are used
    inside only; where a sum feeds sharded computation again, `copy_to(reduce_from(x, a), a)`. A
    residual is taken before it. One too many, with `check_vma=False`, makes gradients too large.

    With `check_vma=True` it casts the type to varying, and a value that varies over the axis
    already is left as it is. With False, take gradients inside the `shard_map`; reverse mode only.

    Args:
      x: `[...]`, any dtype, the same on all devices along the axis.
      axis_name: the manual mesh axis, or a tuple of them, that the model is sharded over.

    Returns:
      `[...]`, x.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here.

    Cost:
      Forward none; backward one all-reduce of x's size.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import copy_to, reduce_from
      >>> def loss(x, w):  # sum_i x * w_i
      ...     return reduce_from(copy_to(x, "mp") * w[0], "mp")
      >>> mesh = jax.make_mesh((8,), ("mp",), (AxisType.Auto,))
      >>> specs = dict(in_specs=(P(), P("mp")), out_specs=P(), check_vma=False)
      >>> float(jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, **specs))(1.0, jnp.arange(8.0)))
      28.0

    References:
      Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.
    """
    x, axes = check_operand("copy_to", x, axis_name)
    with jax.named_scope(_SCOPE):
        copy: jax.Array = vary(x, axes) if is_typed(axes) else from_replicated(x, axes)
    return copy


def reduce_from(x: ArrayLike, axis_name: AxisName) -> jax.Array:
    """Sum the devices' parts to a replicated value (Megatron's g).

    Forward `Y = sum_i x_i`, backward `x_bar_i = Y_bar`: what follows is computed alike on all
    devices and counts once. It belongs at the exit of sharded computation, after row-sharded
    weights and on the loss; where the sum feeds sharded computation again, enter that with
    `copy_to`: `copy_to(reduce_from(x, a), a)`.

    With `check_vma=True` the result's type is invariant over the axis. With False, take gradients
    inside the `shard_map`; reverse mode only.

    Args:
      x: `[...]`, any dtype, each device's own part.
      axis_name: the manual mesh axis, or a tuple of them, that the model is sharded over.

    Returns:
      `[...]`, the sum, the same on all devices along the axis.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here.

    Cost:
      Forward one all-reduce of x's size; backward none. Recomputed in a `jax.checkpoint`, one more,
      unless its policy saves the sum: `save_only_these_names("gradaccum/tensor_parallel")`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import reduce_from
      >>> def loss(w):  # (sum_i w_i) ** 2: by each w_i 2 * 28, not m times that
      ...     return reduce_from(w[0], "mp") ** 2
      >>> mesh = jax.make_mesh((8,), ("mp",), (AxisType.Auto,))
      >>> specs = dict(in_specs=P("mp"), out_specs=P("mp"), check_vma=False)
      >>> jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, **specs))(jnp.arange(8.0)).tolist()
      [56.0, 56.0, 56.0, 56.0, 56.0, 56.0, 56.0, 56.0]
    """
    x, axes = check_operand("reduce_from", x, axis_name)
    with jax.named_scope(_SCOPE):
        if is_typed(axes):
            total: jax.Array = jax.lax.psum(vary(x, axes), axes)
        else:
            total = replicated_sum(x, axes)
    # Outside the rule, as a policy does not look into it.
    named: jax.Array = checkpoint_name(total, _SCOPE)
    return named


def gather_from(x: ArrayLike, axis_name: AxisName, axis: int = -1) -> jax.Array:
    """Concatenate the devices' shards to a replicated value.

    Forward `Y = concatenate(x_0, ..., x_{m-1})` along `axis`, backward `x_bar_i = Y_bar[i]`, this
    device's slice: what follows is computed alike on all devices and counts once, so a replicated
    loss does not multiply the gradient by m. Where Y feeds sharded computation again, enter that
    with `copy_to`.

    With `check_vma=True` the result's type is invariant over the axis. With False, take gradients
    inside the `shard_map`; reverse mode only.

    Args:
      x: `[..., d, ...]`, any dtype, each device's own shard.
      axis_name: the manual mesh axis, or a tuple of them (the first is the slowest, as in a
        `PartitionSpec`), that the model is sharded over.
      axis: the dimension that is sharded, from the end where negative.

    Returns:
      `[..., m * d, ...]`, the same on all devices along the axis.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here; axis is not
        one of x's.

    Cost:
      Forward one all-gather to m times x's size; backward none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import gather_from
      >>> def loss(x):
      ...     return jnp.sum(gather_from(x, "mp") ** 2)
      >>> mesh = jax.make_mesh((8,), ("mp",), (AxisType.Auto,))
      >>> specs = dict(in_specs=P("mp"), out_specs=P("mp"), check_vma=False)
      >>> jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, **specs))(jnp.arange(8.0)).tolist()
      [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    """
    x, axes = check_operand("gather_from", x, axis_name)
    axis = dimension_of("gather_from", x, axis)
    gather = _all_gather if is_typed(axes) else _gather
    whole: jax.Array = gather(vary(x, axes), axes, axis)
    return whole


def scatter_to(x: ArrayLike, axis_name: AxisName, axis: int = -1) -> jax.Array:
    """Take this device's slice of a replicated value.

    Forward `y_i = X[i]`, the i-th of m equal slices along `axis`, backward
    `X_bar = concatenate(y_bar_0, ..., y_bar_{m-1})`, the same on all devices again.

    With `check_vma=True` a value whose type varies over the axis already is sliced as this
    device's own, and its cotangent is zero outside the slice. With False, take gradients inside
    the `shard_map`. Reverse mode only in both.

    Args:
      x: `[..., d, ...]`, any dtype, the same on all devices along the axis.
      axis_name: the manual mesh axis, or a tuple of them (the first is the slowest, as in a
        `PartitionSpec`), that the model is sharded over.
      axis: the dimension to split, from the end where negative; m divides d.

    Returns:
      `[..., d / m, ...]`.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here; axis is not
        one of x's, or m does not divide its size.

    Cost:
      Forward none; backward one all-gather to x's size, half the
      bytes of the all-reduce that a plain slice's transpose needs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import reduce_from, scatter_to
      >>> def loss(x):
      ...     return reduce_from(jnp.sum(scatter_to(x, "mp") ** 2), "mp")
      >>> mesh = jax.make_mesh((8,), ("mp",), (AxisType.Auto,))
      >>> specs = dict(in_specs=P(), out_specs=P(), check_vma=False)
      >>> jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, **specs))(jnp.arange(8.0)).tolist()
      [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    """
    x, axes = check_operand("scatter_to", x, axis_name)
    axis = dimension_of("scatter_to", x, axis)
    check_splits("scatter_to", x, axis, axis_name)
    part: jax.Array = (_slice if varying_axes(x) & set(axes) else _scatter)(x, axes, axis)
    return part


# --- Gather and scatter are each other's transpose; copy and sum are too, see _reduce -------------


def _all_gather(x: jax.Array, axes: tuple[str, ...], axis: int) -> jax.Array:
    # 'invarying': the type says that all devices hold the same, and the transpose is a slice.
    with jax.named_scope(_SCOPE):
        whole: jax.Array = jax.lax.all_gather(x, axes, axis=axis, tiled=True, to="invarying")
    return whole


def _slice(x: jax.Array, axes: tuple[str, ...], axis: int) -> jax.Array:
    size = x.shape[axis] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(vary(x, axes), jax.lax.axis_index(axes) * size, size, axis)


_gather, _scatter = transposes(_all_gather, _slice)
