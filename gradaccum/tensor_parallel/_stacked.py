"""Trees of the devices' shards, stacked along a leading axis, and the global arrays they make."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum._mesh import AxisName, axis_tuple
from gradaccum._specs import axes_in, dims_of, only, spread
from gradaccum.tensor_parallel._axes import padded


def unstack(tree: Any, specs: Any, axis_name: AxisName) -> Any:
    """Make global arrays of the devices' shards, which are stacked along a leading axis.

    A leaf whose spec names the axis is `concatenate(x[0], ..., x[m-1])` along that dimension. Any
    other is replicated: its m copies must be equal, and one is taken.

    Args:
      tree: leaves `[m, *local]`, any dtype: each device's own, as an init of one shard
        leaves them under `jax.vmap`. (The operators need a `shard_map`, also in an init.)
      specs: a pytree prefix of tree, of `PartitionSpec`s of the *global* arrays, or None for
        replicated. Axes other than axis_name are ignored.
      axis_name: the mesh axis, or a tuple of them (the first is the slowest; then each spec that
        names one names all, in this order, in one dimension), that the model is sharded over.

    Returns:
      The same tree with leaves `[*global]`, to be placed by the same specs; the inverse of `stack`.

    Raises:
      ValueError: specs is no prefix of tree; leaves differ in their leading size m; a spec names a
        dimension that a leaf does not have, or the axis twice, or behind another; axis_name names
        no axis, or one twice; the copies of a replicated leaf differ (seen where arrays are
        concrete, and whole on this host): were shards initialised by keys of their own?
      TypeError: specs holds anything but PartitionSpecs and None.

    Cost:
      No collective of its own; a copy of the tree.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from gradaccum.tensor_parallel import unstack
      >>> shards = {"w": jnp.arange(4).reshape(2, 1, 2), "b": jnp.ones((2, 1))}
      >>> whole = unstack(shards, {"w": P(None, "mp"), "b": P()}, "mp")
      >>> whole["w"].tolist(), whole["b"].tolist()
      ([[0, 1, 2, 3]], [1.0])
    """
    leaves, treedef = _read("unstack", tree, specs, axis_name, leading=1)
    if len({x.shape[0] for _, x, _ in leaves}) > 1:
        shapes = ", ".join(f"{path} {x.shape}" for path, x, _ in leaves)
        raise ValueError(
            f"unstack: leading sizes differ: {shapes}. Every leaf must be [m, *local], replicated "
            "ones too."
        )
    _check_copies([(path, x) for path, x, dimension in leaves if dimension is None])

    def merge(x: jax.Array, dimension: int | None) -> jax.Array:
        if dimension is None:
            return x[0]
        parts = jnp.moveaxis(x, 0, dimension)
        m, size = parts.shape[dimension : dimension + 2]
        shape = (*parts.shape[:dimension], m * size, *parts.shape[dimension + 2 :])
        return parts.reshape(shape)

    return jax.tree.unflatten(treedef, [merge(x, dimension) for _, x, dimension in leaves])


def stack(tree: Any, specs: Any, axis_name: AxisName, size: int) -> Any:
    """Cut global arrays into the devices' shards, stacked along a leading axis.

    A leaf whose spec names the axis is split in `size` along that dimension; any other is copied.

    Args:
      tree: leaves `[*global]`, any dtype.
      specs: a pytree prefix of tree, of `PartitionSpec`s, or None for replicated. Axes other than
        axis_name are ignored.
      axis_name: the mesh axis, or a tuple of them (the first is the slowest; then each spec that
        names one names all, in this order, in one dimension), that the model is sharded over.
      size: m, the number of devices along axis_name.

    Returns:
      The same tree with leaves `[m, *local]`; the inverse of `unstack`.

    Raises:
      ValueError: specs is no prefix of tree; m does not divide a dimension that is split (the
        message names the size to pad to); a spec names a dimension that a leaf does not have, or
        the axis twice, or behind another; axis_name names no axis, or one twice; size is less
        than 1.
      TypeError: specs holds anything but PartitionSpecs and None; size is no int.

    Cost:
      No collective of its own; a copy of the tree, of replicated leaves m.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from gradaccum.tensor_parallel import stack
      >>> stack({"w": jnp.arange(4)[None]}, {"w": P(None, "mp")}, "mp", 2)["w"].tolist()
      [[[0, 1]], [[2, 3]]]
    """
    try:
        m = operator.index(size)
    except TypeError:
        raise TypeError(
            f"stack: size is {size!r}; it must be an int, the number of devices along {axis_name}."
        ) from None
    if m < 1:
        raise ValueError(f"stack: size is {size}; it must be >= 1, the devices along {axis_name}.")
    leaves, treedef = _read("stack", tree, specs, axis_name, leading=0)
    bad = [
        f"{path} has shape {x.shape}; axis {d} ({x.shape[d]}) is not divisible by the {m} devices "
        f"along {axis_name!r}: pad it to {padded(x.shape[d], m)}"
        for path, x, d in leaves
        if d is not None and x.shape[d] % m
    ]
    if bad:
        raise ValueError(f"stack: {'; '.join(bad)}, or leave it replicated.")

    def split(x: jax.Array, dimension: int | None) -> jax.Array:
        if dimension is None:
            return jnp.broadcast_to(x, (m, *x.shape))
        shape = (*x.shape[:dimension], m, x.shape[dimension] // m, *x.shape[dimension + 1 :])
        return jnp.moveaxis(x.reshape(shape), dimension, 0)

    return jax.tree.unflatten(treedef, [split(x, dimension) for _, x, dimension in leaves])


def _read(
    api: str, tree: Any, specs: Any, axis_name: AxisName, leading: int
) -> tuple[list[tuple[str, jax.Array, int | None]], Any]:
    """Returns (path, leaf, the global dimension that is split or None), and the structure."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree)
    axes, found, bad = axis_tuple(axis_name), [], []
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"{api}: got axis_name={axis_name!r}, needed a mesh axis or a tuple of different ones."
        )
    for (path, leaf), spec in zip(keyed, spread(api, specs, tree), strict=True):
        name, x = jax.tree_util.keystr(path) or "tree", jnp.asarray(leaf)
        dims = dims_of(spec)
        split = next((d for d, names in enumerate(dims) if set(names) & set(axes)), None)
        named = axes_in(only(dims, axes))
        here = f"{name} has shape {x.shape} and spec {spec}"
        if split is not None and not named == dims[split][: len(axes)] == axes:
            bad.append(f"{here}, which must name {axis_name!r} first in one dimension, or nowhere")
        elif x.ndim < len(dims) + leading:
            bad.append(f"{here}, which has more dimensions" + (" than [m, *local]" * leading))
        found.append((name, x, split))
    if bad:
        raise ValueError(f"{api}: {'; '.join(bad)}.")
    return found, treedef


def _check_copies(leaves: list[tuple[str, jax.Array]]) -> None:
    bad = []
    for path, x in leaves:
        if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable:
            continue
        copies = np.asarray(jax.random.key_data(x) if _is_key(x) else x)
        both_nan = (copies != copies) & (copies[:1] != copies[:1])
        if not np.all((copies == copies[:1]) | both_nan):
            bad.append(path)
    if bad:
        raise ValueError(
            f"unstack: the copies of {', '.join(bad)} differ, but their specs say replicated. "
            "Name the axis in their specs; or make them equal: initialise in full and `stack`, "
            "not by a key for each shard."
        )


def _is_key(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
