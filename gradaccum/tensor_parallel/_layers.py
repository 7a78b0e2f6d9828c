"""The layers whose weights are sharded over a model axis: an embedding, columns, rows.

Each takes this device's shard of its weights and, on every device, the same activations; with
`sequence_axis` the activations are sharded too, along the sequence, on the side where the weights
are not. Functions of arrays: call them from a plain function, or from a Haiku or Flax module.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gradaccum._mesh import AxisName, axis_name_of
from gradaccum.tensor_parallel._axes import (
    check_operand,
    check_sharded,
    check_splits,
    dimension_of,
)
from gradaccum.tensor_parallel._operators import copy_to, reduce_from
from gradaccum.tensor_parallel._sequence import all_gather_to, reduce_scatter_from

_SCOPE = "gradaccum/tensor_parallel"


def embedding(table: ArrayLike, ids: ArrayLike, axis_name: AxisName) -> jax.Array:
    """Look up rows of a table whose rows are sharded.

    `Y = sum_i [ids in shard i] table_i[ids - i V/m]`: each device looks up the ids that it owns,
    has zeros for the others, and the devices' parts are summed. An id outside `[0, V)` (padding,
    -1) gives zeros and no gradient; `table[ids]` of JAX would wrap or clamp it.

    Args:
      table: `[V/m, D]`, any dtype, this device's rows: device i of m holds those from `i V/m`.
      ids: `[...]`, integers of any width, the global row numbers, the same on all devices.
      axis_name: the manual mesh axis, or a tuple of them, that the rows are sharded over.

    Returns:
      `[..., D]` in the table's dtype, the same on all devices; exact, as all parts but one are 0.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here; table is no
        matrix, or (with `check_vma=True`) the same on all devices.
      TypeError: ids are no integers.

    Cost:
      Forward one all-reduce of the result's size; backward none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import embedding
      >>> mesh = jax.make_mesh((8,), ("mp",), (AxisType.Auto,))
      >>> specs = dict(in_specs=(P("mp"), P()), out_specs=P(), check_vma=False)
      >>> look_up = jax.shard_map(lambda t, i: embedding(t, i, "mp"), mesh=mesh, **specs)
      >>> look_up(10.0 * jnp.arange(16)[:, None], jnp.array([1, 5, -1])).tolist()
      [[10.0], [50.0], [0.0]]

    References:
      Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.
    """
    table, axes = check_operand("embedding", table, axis_name)
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"embedding: got ids of dtype {ids.dtype}, needed integers: the global row numbers."
        )
    if table.ndim != 2:
        raise ValueError(
            f"embedding: got table with shape {table.shape}, needed [V/m, D]: this device's rows."
        )
    check_sharded("embedding", "table", table, axes, "rows")
    size = table.shape[0]
    # Signed, as it may be below 0. JAX would promote uint64 to a float; what is too large for the
    # signed integer wraps to below 0, which is no row either.
    wide = jnp.int64 if ids.dtype.itemsize > 4 else jnp.int32
    local = ids.astype(wide) - jax.lax.axis_index(axes) * size
    ours = (local >= 0) & (local < size)
    with jax.named_scope(_SCOPE):
        rows = jnp.take(table, jnp.where(ours, local, 0), axis=0, mode="clip")
        return reduce_from(jnp.where(ours[..., None], rows, 0), axes)


def column_dense(
    x: ArrayLike,
    w: ArrayLike,
    b: ArrayLike | None,
    axis_name: AxisName,
    *,
    sequence_axis: int | None = None,
) -> jax.Array:
    """Multiply by weights whose columns are sharded: f, then this device's columns.

    `y_i = f(X) @ w_i + b_i`. The result is this device's part of the features; a pointwise
    function and `row_dense` may follow without communication. Logits for `cross_entropy` too.

    Args:
      x: `[..., D]`, the same on all devices; with `sequence_axis`, this device's part of it.
      w: `[D, F/m]`, this device's columns.
      b: `[F/m]`, this device's part of the bias, or None.
      axis_name: the manual mesh axis, or a tuple of them, that the columns are sharded over.
      sequence_axis: the dimension of x that is sharded (sequence parallelism), from the end where
        negative; x is then gathered along it. None: x is whole.

    Returns:
      `[..., F/m]` in the dtype of `x @ w + b`; along `sequence_axis` m times x's size.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here; the shapes do
        not match; sequence_axis is not a dimension of x, or is the last; with `check_vma=True`, w
        is the same on all devices.

    Cost:
      Forward none, backward one all-reduce of x's size. With `sequence_axis`: forward one
      all-gather to m times x's size, backward one reduce-scatter from it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import column_dense, row_dense
      >>> def mlp(p, x):
      ...     h = jnp.tanh(column_dense(x, p["up"], p["up_bias"], "mp"))
      ...     return row_dense(h, p["down"], p["down_bias"], "mp")
      >>> mesh = jax.make_mesh((8,), ("mp",), (AxisType.Auto,))
      >>> specs = {"up": P(None, "mp"), "up_bias": P("mp"), "down": P("mp"), "down_bias": P()}
      >>> shapes = {"up": (4, 16), "up_bias": (16,), "down": (16, 4), "down_bias": (4,)}
      >>> p = {name: jnp.ones(shape) for name, shape in shapes.items()}
      >>> f = jax.shard_map(mlp, mesh=mesh, in_specs=(specs, P()), out_specs=P())
      >>> round(float(f(p, jnp.zeros((1, 4)))[0, 0]), 4)  # 16 tanh(1) + 1
      13.1855

    References:
      Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.
    """
    x, axes = check_operand("column_dense", x, axis_name)
    w, b = _weights("column_dense", x, w, b, axes, "columns")
    if sequence_axis is None:
        x = copy_to(x, axes)
    else:
        x = all_gather_to(x, axes, _sequence("column_dense", x, sequence_axis))
    return _add_bias(x @ w, b)


def row_dense(
    x: ArrayLike,
    w: ArrayLike,
    b: ArrayLike | None,
    axis_name: AxisName,
    *,
    sequence_axis: int | None = None,
) -> jax.Array:
    """Multiply by weights whose rows are sharded: this device's rows, g, then the bias.

    `Y = g(sum_i x_i @ w_i) + b`. The bias is added once, after the sum; before it, it would count
    m times.

    Args:
      x: `[..., F/m]`, this device's part of the features.
      w: `[F/m, D]`, this device's rows.
      b: `[D]`, whole and the same on all devices, or None.
      axis_name: the manual mesh axis, or a tuple of them, that the rows are sharded over.
      sequence_axis: the dimension of the result to leave sharded (sequence parallelism), from the
        end where negative; m divides it. None: the result is whole.

    Returns:
      `[..., D]` in the dtype of `x @ w + b`, the same on all devices; with `sequence_axis`, this
      device's part of it. Partial sums travel in that dtype.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here; the shapes do
        not match; sequence_axis is not a dimension of x, is the last, or is not divisible by m;
        with `check_vma=True`, w is the same on all devices.

    Cost:
      Forward one all-reduce of the result's size, backward none. With `sequence_axis`: forward one
      reduce-scatter of the whole result, backward one all-gather to it, and one all-reduce of b's
      size.

    Example:
      See `column_dense`.

    References:
      Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.
    """
    x, axes = check_operand("row_dense", x, axis_name)
    w, b = _weights("row_dense", x, w, b, axes, "rows")
    if sequence_axis is None:
        return _add_bias(reduce_from(x @ w, axes), b)
    axis = _sequence("row_dense", x, sequence_axis)
    check_splits("row_dense", x, axis, axis_name)
    part = reduce_scatter_from(x @ w, axes, axis)
    return _add_bias(part, None if b is None else copy_to(b, axes))


def _add_bias(y: jax.Array, b: jax.Array | None) -> jax.Array:
    return y if b is None else y + jnp.expand_dims(b, range(y.ndim - 1))


def _weights(
    api: str, x: jax.Array, w: ArrayLike, b: ArrayLike | None, axes: tuple[str, ...], what: str
) -> tuple[jax.Array, jax.Array | None]:
    w, b = jnp.asarray(w), None if b is None else jnp.asarray(b)
    if (
        x.ndim < 1
        or w.ndim != 2
        or x.shape[-1] != w.shape[0]
        or (b is not None and b.shape != w.shape[1:])
    ):
        bias = "no bias" if b is None else f"b {b.shape}"
        m = jax.lax.axis_size(axes)
        raise ValueError(
            f"{api}: got x {x.shape}, w {w.shape}, {bias}; needed x [..., I], w [I, O] and b [O]. "
            f"They are this device's parts: w has 1/{m} of the {what} (axis_name="
            f"{axis_name_of(axes)!r}, {m} devices)."
        )
    check_sharded(api, "w", w, axes, what)
    return w, b


def _sequence(api: str, x: jax.Array, sequence_axis: int) -> int:
    axis = dimension_of(api, x, sequence_axis, "sequence_axis")
    if axis == x.ndim - 1:
        raise ValueError(
            f"{api}: got sequence_axis={sequence_axis} for x with shape {x.shape}; the last "
            "dimension holds the features. Give the dimension of the sequence."
        )
    return axis
