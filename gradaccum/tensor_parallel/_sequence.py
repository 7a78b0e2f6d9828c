"""The two operators of sequence parallelism, where activations are sharded between the layers.

Each is two of the four operators in one collective of half the bytes: `all_gather_to(x)` has the
values and gradients of `copy_to(gather_from(x))`, `reduce_scatter_from(x)` those of
`scatter_to(reduce_from(x))`. In the equations device i of m holds x_i; a bar marks a cotangent.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from gradaccum._mesh import AxisName, is_typed, vary
from gradaccum._transpose import transposes
from gradaccum.tensor_parallel._axes import check_operand, check_splits, dimension_of

_SCOPE = "gradaccum/tensor_parallel"


def all_gather_to(x: ArrayLike, axis_name: AxisName, axis: int = -1) -> jax.Array:
    """Take sharded values, gathered whole, into sharded computation.

    Forward `y_i = concatenate(x_0, ..., x_{m-1})` along `axis`, backward
    `x_bar_i = (sum_j y_bar_j)[i]`: each device's computation uses all of y, so each contributes to
    every shard's gradient. It belongs where sequence-sharded activations enter column-sharded
    weights. Where a replicated loss follows, `gather_from` is the right one.

    With `check_vma=True` the result's type varies over the axis. With False, take gradients
    inside the `shard_map`; reverse mode only.

    Args:
      x: `[..., d, ...]`, any dtype, each device's own shard.
      axis_name: the manual mesh axis, or a tuple of them (the first is the slowest, as in a
        `PartitionSpec`), that the model is sharded over.
      axis: the dimension that is sharded, from the end where negative.

    Returns:
      `[..., m * d, ...]`.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here; axis is not
        one of x's.

    Cost:
      Forward one all-gather to m times x's size; backward one reduce-scatter from that size.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import all_gather_to, reduce_from
      >>> def loss(x, w):  # sum_i w_i * sum(x)
      ...     return reduce_from(w[0] * jnp.sum(all_gather_to(x, "mp")), "mp")
      >>> mesh = jax.make_mesh((8,), ("mp",), (AxisType.Auto,))
      >>> specs = dict(in_specs=(P("mp"), P("mp")), out_specs=P("mp"), check_vma=False)
      >>> grad = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, **specs))
      >>> grad(jnp.ones(8), jnp.arange(8.0)).tolist()
      [28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0]

    References:
      Korthikanti et al., Reducing activation recomputation in large transformer models,
      https://arxiv.org/abs/2205.05198, section 4.2.2 (its g).
    """
    x, axes = check_operand("all_gather_to", x, axis_name)
    axis = dimension_of("all_gather_to", x, axis)
    gather = _gather if is_typed(axes) else _gather_untyped
    whole: jax.Array = gather(vary(x, axes), axes, axis)
    return whole


def reduce_scatter_from(x: ArrayLike, axis_name: AxisName, axis: int = -1) -> jax.Array:
    """Sum the devices' parts, and leave each device its slice of the sum.

    Forward `y_i = (sum_j x_j)[i]`, the i-th of m equal slices along `axis`, backward
    `x_bar_i = concatenate(y_bar_0, ..., y_bar_{m-1})`. It belongs after row-sharded weights, where
    the next computation is sharded along the sequence.

    With `check_vma=True` the result's type varies over the axis. With False, take gradients
    inside the `shard_map`; reverse mode only.

    Args:
      x: `[..., d, ...]`, any dtype, each device's own part of the sum.
      axis_name: the manual mesh axis, or a tuple of them (the first is the slowest, as in a
        `PartitionSpec`), that the model is sharded over.
      axis: the dimension to split, from the end where negative; m divides d.

    Returns:
      `[..., d / m, ...]`.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here; axis is not
        one of x's, or m does not divide its size.

    Cost:
      Forward one reduce-scatter from x's size; backward one all-gather to it. Recomputed in a
      `jax.checkpoint`, one more reduce-scatter, unless its policy saves the sum:
      `save_only_these_names("gradaccum/tensor_parallel")`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import copy_to, reduce_from, reduce_scatter_from
      >>> def loss(x):  # every device adds the same x, so y is 8 x: the loss is 64 sum(x ** 2)
      ...     y = reduce_scatter_from(copy_to(x, "mp"), "mp")
      ...     return reduce_from(jnp.sum(y**2), "mp")
      >>> mesh = jax.make_mesh((8,), ("mp",), (AxisType.Auto,))
      >>> specs = dict(in_specs=P(), out_specs=P(), check_vma=False)
      >>> grad = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, **specs))
      >>> grad(jnp.arange(8.0)).tolist()
      [0.0, 128.0, 256.0, 384.0, 512.0, 640.0, 768.0, 896.0]

    References:
      Korthikanti et al., https://arxiv.org/abs/2205.05198, section 4.2.2 (its g bar).
    """
    x, axes = check_operand("reduce_scatter_from", x, axis_name)
    axis = dimension_of("reduce_scatter_from", x, axis)
    check_splits("reduce_scatter_from", x, axis, axis_name)
    scatter = _scatter if is_typed(axes) else _scatter_untyped
    part: jax.Array = checkpoint_name(scatter(vary(x, axes), axes, axis), _SCOPE)
    return part


# JAX's own transposes of these two are right in both modes; where types are not checked the rules
# below say so to `accumulate`, which cannot tell a raw all-gather's later use.


def _gather(x: jax.Array, axes: tuple[str, ...], axis: int) -> jax.Array:
    with jax.named_scope(_SCOPE):
        whole: jax.Array = jax.lax.all_gather(x, axes, axis=axis, tiled=True)
    return whole


def _scatter(x: jax.Array, axes: tuple[str, ...], axis: int) -> jax.Array:
    with jax.named_scope(_SCOPE):
        part: jax.Array = jax.lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)
    return part


_gather_untyped, _scatter_untyped = transposes(_gather, _scatter)
