"""The global norm of a tree of shards, and clipping by it, inside a `shard_map`."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradaccum._mesh import AxisName, varying_axes
from gradaccum._specs import axes_in, dims_of, only, spread
from gradaccum.tensor_parallel._axes import check_axes
from gradaccum.tensor_parallel._operators import reduce_from


def global_norm(tree: Any, specs: Any, axis_name: AxisName) -> jax.Array:
    """Return the norm of a tree of which each device holds shards, inside a `shard_map`.

    `sqrt(sum_leaves sum |x|^2)` of the global arrays: a leaf whose spec names an axis is summed
    over that axis too, a replicated one counts once. It equals `optax.tree.norm` of the global
    arrays, which outside of a `shard_map`, under jit, is the one to take.

    Args:
      tree: leaves `[*local]`, any float or complex dtype, this device's shards.
      specs: a pytree prefix of tree, of `PartitionSpec`s: how the arrays lie (the `in_specs` of the
        parameters, for gradients), or None for replicated.
      axis_name: the manual mesh axis, or a tuple of them, that leaves may be sharded over. Give all
        that are: axes that only specs name are not summed over.

    Returns:
      `[]`, the same on all devices along the axes; squares are summed in float32 at least. 0 for
      a tree without leaves.

    Raises:
      ValueError: axis_name names no axis, one twice, or one that is not manual here; specs is no
        prefix of tree; with `check_vma=True`, a leaf differs over an axis that its spec does not
        name.
      TypeError: specs holds anything but PartitionSpecs and None.

    Cost:
      One all-reduce of 4 bytes for each different set of axes that leaves are sharded over: mostly
      one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import global_norm
      >>> mesh, specs = jax.make_mesh((8,), ("mp",), (AxisType.Auto,)), {"w": P("mp"), "b": P()}
      >>> f = jax.shard_map(
      ...     lambda t: global_norm(t, specs, "mp"), mesh=mesh, in_specs=(specs,), out_specs=P()
      ... )
      >>> f({"w": jnp.ones(8), "b": jnp.ones(1)})  # sqrt(8 + 1)
      Array(3., dtype=float32)
    """
    return jnp.sqrt(_square("global_norm", tree, specs, axis_name))


def clip_by_global_norm(
    max_norm: float, specs: Any, axis_name: AxisName
) -> optax.GradientTransformation:
    """Clip gradients of which each device holds shards by their global norm.

    `optax.clip_by_global_norm` for use inside a `shard_map`: there optax's would take each device's
    own norm, and replicated parameters would diverge. Where g is the norm (see `global_norm`),
    updates are multiplied by `max_norm / g` if `g > max_norm`, and else left bitwise as they are.

    What follows it in a chain must treat entries one by one, as adamw does. Transformations that
    look at whole leaves (trust ratios and factored moments: `optax.lamb`, `lars`, `adafactor`;
    clipping by block or unit) take a shard for the leaf: run those outside, under jit on the global
    arrays.

    Args:
      max_norm: the largest norm, > 0.
      specs: a pytree prefix of the updates, of `PartitionSpec`s: how they lie, or None for
        replicated.
      axis_name: the manual mesh axis, or a tuple of them, that leaves may be sharded over.

    Returns:
      A stateless `optax.GradientTransformation`; its updates keep their dtypes.

    Raises:
      ValueError: max_norm is not a number > 0; and from `update`, those of `global_norm`.

    Cost:
      That of `global_norm`, in each `update`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from gradaccum.tensor_parallel import clip_by_global_norm
      >>> mesh, specs = jax.make_mesh((8,), ("mp",), (AxisType.Auto,)), {"w": P("mp"), "b": P()}
      >>> clip = clip_by_global_norm(1.0, specs, "mp")
      >>> f = jax.shard_map(
      ...     lambda g: clip.update(g, clip.init(g))[0],
      ...     mesh=mesh, in_specs=(specs,), out_specs=specs,
      ... )
      >>> f({"w": jnp.ones(8), "b": jnp.ones(1)})["b"]  # 1 / sqrt(8 + 1)
      Array([0.33333334], dtype=float32)
    """
    if not isinstance(max_norm, numbers.Real) or not max_norm > 0 or math.isnan(max_norm):
        raise ValueError(f"clip_by_global_norm: max_norm is {max_norm!r}; it must be a number > 0.")

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        norm = jnp.sqrt(_square("clip_by_global_norm", updates, specs, axis_name))
        # As in optax: one NaN makes all updates NaN, which is to be seen.
        keep, factor = norm <= max_norm, max_norm / norm

        def clip(g: jax.Array) -> jax.Array:
            return jnp.where(keep, g, (g * factor).astype(g.dtype))

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _square(api: str, tree: Any, specs: Any, axis_name: AxisName) -> jax.Array:
    """Returns the square of the norm."""
    axes = check_axes(api, axis_name)
    parts: dict[tuple[str, ...], list[jax.Array]] = {}
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    bad = []
    for (path, x), spec in zip(keyed, spread(api, specs, tree), strict=True):
        over, x = axes_in(only(dims_of(spec), axes)), jnp.asarray(x)
        if unsaid := (varying_axes(x) & set(axes)).difference(over):
            name = jax.tree_util.keystr(path)
            bad.append(f"{name} {x.shape} differs over {', '.join(unsaid)}, its spec is {spec}")
        real = jnp.real(x * jnp.conj(x)) if jnp.iscomplexobj(x) else x
        wide = real.astype(jnp.promote_types(real.dtype, jnp.float32))
        square = jnp.sum(wide if jnp.iscomplexobj(x) else wide * wide)
        parts.setdefault(tuple(a for a in axes if a in over), []).append(square)
    if bad:
        raise ValueError(
            f"{api}: {'; '.join(bad)}. Give specs as the arrays lie: those of the in_specs."
        )
    with jax.named_scope("gradaccum/global_norm"):
        total = zero = jnp.zeros((), jnp.float32)  # so that x64 alone widens nothing
        for over, squares in parts.items():
            local = sum(squares, start=zero)
            total += reduce_from(local, over) if over else local
    return total
