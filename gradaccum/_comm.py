"""Communication hooks: what is asked of them, and the one way in which they are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum._layout import Layout
from gradaccum._means import Awaited, cast
from gradaccum._mesh import AxisName, DataMesh, axis_name_of, is_typed, vary
from gradaccum._rows import zero_rows
from gradaccum._specs import axes_in, dims_of, only
from gradaccum._state import as_before, strong
from gradaccum._unreduced import Unreduced, is_unreduced, new_guard
from gradaccum._unreduced_checks import kind_of


def check_hook(api: str, hook: Any) -> Any:
    """Returns a communication hook, or None as it is; raises TypeError for anything else."""
    if hook is None:
        return None
    if isinstance(hook, type):
        raise TypeError(
            f"{api}: comm_hook is the class {hook.__name__}; give an instance: "
            f"comm_hook={hook.__name__}()."
        )
    if not callable(hook) or not callable(getattr(hook, "init", None)):
        raise TypeError(
            f"{api}: comm_hook is {hook!r}; it must have init(unreduced) -> state and be callable, "
            "(unreduced, state) -> (mean, state), such as gradaccum.hooks.bf16_compress()."
        )
    try:
        hash(hook)
    except TypeError as e:
        raise TypeError(
            f"{api}: comm_hook {type(hook).__name__} is not hashable ({e}); it is part of a "
            "program's cache key. Make it a dataclasses.dataclass(frozen=True) of hashable fields."
        ) from e
    return hook


def unreduced_of(
    api: str,
    hook: Any,
    tree: Any,
    sums: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    awaited: Sequence[Awaited],
    axis_name: AxisName | None,
    where: DataMesh,
) -> Any:
    """Returns the tree of `Unreduced` that a hook is given, of rows `[n, *shape]`, or one's own."""
    narrow = sorted({str(jnp.dtype(a.reduce_dtype)) for a in awaited if a.reduce_dtype is not None})
    if narrow:
        raise ValueError(
            f"{api}: reduce_dtype={', '.join(narrow)} of the gradients beside comm_hook "
            f"{type(hook).__name__}: the hook says what travels. Leave one of them out."
        )
    guard = new_guard(sums[0].shape[0]) if sums else None
    return tree.unflatten(
        [
            Unreduced(x, w, axis_name, _on(a, where), guard)
            for x, w, a in zip(sums, weights, awaited, strict=True)
        ]
    )


def _on(awaited: Awaited, where: DataMesh) -> Awaited:
    """Returns how a mean is taken, on the mesh that is known here."""
    mesh = where.mesh if awaited.mesh is None else awaited.mesh
    return dataclasses.replace(awaited, scale=1.0, mesh=mesh)


def awaited_of(params: Sequence[jax.Array], where: DataMesh) -> list[Awaited]:
    """Returns how gradients of these parameters are awaited, as far as their layout says it."""

    def awaited(x: jax.Array) -> Awaited:
        placed = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        spec = getattr(placed, "spec", None)
        dims = only(
            dims_of(jax.typeof(x).sharding.spec if spec is None else spec), where.axis_names
        )
        if where.manual or not axes_in(dims):
            return Awaited(dtype=x.dtype)
        pairs = tuple((i, a) for i, d in enumerate(dims) for a in d)
        return Awaited(dtype=x.dtype, layout=Layout(True, dims, dims, scattered=pairs))

    return [awaited(x) for x in params]


def init_state(
    api: str,
    hook: Any,
    params: Sequence[jax.Array],
    tree: Any,
    dtypes: Sequence[Any],
    axis_name: AxisName,
    where: DataMesh,
) -> Any:
    """Returns a hook's first state, for gradients of these parameters.

    Its `init` is given rows of zeros, laid out as gradients will be, which are then dropped.
    """
    rows, weights = zero_rows(params, dtypes, where)
    shared = weights[:1] * len(rows)  # as gradients of one call share theirs
    given = unreduced_of(api, hook, tree, rows, shared, awaited_of(params, where), axis_name, where)
    return jax.tree.map(strong, hook.init(given))


def call(api: str, hook: Any, given: Any, state: Any) -> tuple[Any, Any]:
    """Calls a hook, and checks what it returns.

    Args:
      api: what raises.
      hook: the hook.
      given: a tree of `Unreduced`.
      state: its state.

    Returns:
      `(mean, state)`: the mean in the dtypes awaited, the state of its old type.

    Raises:
      TypeError: it returned something else than a pair, or leaves that are no arrays.
      ValueError: a mean of another structure or shape; a state of another structure or shape.
    """
    name = type(hook).__name__
    out = hook(given, state)
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(
            f"{api}: comm_hook {name} returned {kind_of(out)}; it must return (mean, state)."
        )
    mean, after = out
    tree: Any
    got_tree: Any
    keyed, tree = jax.tree_util.tree_flatten_with_path(given, is_leaf=is_unreduced)
    got, got_tree = jax.tree_util.tree_flatten_with_path(mean, is_leaf=is_unreduced)
    if got_tree != tree:
        raise ValueError(
            f"{api}: comm_hook {name} returned a mean of the structure {got_tree}; the gradients "
            f"have {tree}. Return the same structure, one array a leaf."
        )
    still = [jax.tree_util.keystr(path) for path, x in got if is_unreduced(x)]
    if still:
        raise TypeError(
            f"{api}: comm_hook {name} returned what is still Unreduced: {', '.join(still)}. It "
            "takes the mean itself, and alone: gradaccum.mean(...)."
        )
    bad = [
        f"{jax.tree_util.keystr(path) or 'the mean'} has {jnp.shape(m)}, needed {shape}"
        for (path, m), (_, x) in zip(got, keyed, strict=True)
        if jnp.shape(m) != (shape := _mean_shape(x))
    ]
    if bad:
        raise ValueError(
            f"{api}: comm_hook {name} returned means of other shapes: {'; '.join(bad)}."
        )
    _check_state(api, name, after, state)
    values = [
        cast(jnp.asarray(m), x.sum, x.awaited) for (_, m), (_, x) in zip(got, keyed, strict=True)
    ]
    return tree.unflatten(values), jax.tree.map(as_before, after, state)


@jax.custom_jvp
def _undifferentiated(x: jax.Array) -> jax.Array:
    return x


@_undifferentiated.defjvp
def _refuse_derivative(*_: Any) -> Any:
    raise TypeError(
        "accumulate: a second derivative through comm_hook: what it rounds has the derivative 0, "
        "which is not the mean's. Take second derivatives of the loss decorated without one."
    )


def mean_of_sums(
    api: str,
    hook: Any,
    structure: Any,
    sums: Sequence[jax.Array],
    weight: jax.Array,
    awaited: Sequence[Awaited],
    where: DataMesh,
) -> list[jax.Array]:
    """Returns the means that a hook without a state takes of one device's sums, in its region.

    Args:
      api: what raises.
      hook: the hook.
      structure: the tree that it sees.
      sums: `[*shape]` each.
      weight: float32 `[]`, theirs.
      awaited: how each mean is taken.
      where: the data axes.

    Raises:
      ValueError: the hook has a state, which a loss function has no place for; and as `call`.
      TypeError: the means are differentiated.
    """
    typed = where.axis_names if is_typed(where.axis_names) else ()
    weights = [vary(weight.astype(jnp.float32)[None], typed)] * len(sums)
    rows = [vary(_undifferentiated(x)[None], typed) for x in sums]
    axis_name = axis_name_of(where.axis_names)
    given = unreduced_of(api, hook, structure, rows, weights, awaited, axis_name, where)
    state = hook.init(given)
    if kept := jax.tree.leaves(state):
        raise ValueError(
            f"{api}: comm_hook {hook!r} has a state of {len(kept)} arrays, which a "
            "loss function has no place for. Give it to the optimizer: gradaccum.MultiSteps("
            "..., comm_hook=...) or gradaccum.all_reduce_mean(..., comm_hook=...), with gradients "
            "from gradaccum.unreduced_value_and_grad. (bf16_compress, fp16_compress and "
            "int8_quantize as it is have none.)"
        )
    mean, _ = call(api, hook, given, state)
    return jax.tree.leaves(mean)


def _mean_shape(x: Unreduced) -> tuple[int, ...]:
    """Returns the shape of a leaf's mean: inside a manual region, of this device's part."""
    shape = list(x.sum.shape[1:])
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for dimension, axis in x.awaited.layout.cut:
        if axis in manual:
            shape[dimension] //= jax.lax.axis_size(axis)
    return tuple(shape)


def _check_state(api: str, name: str, after: Any, before: Any) -> None:
    trees: list[Any] = [jax.tree.structure(x) for x in (after, before)]
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(s)] for s in (after, before)]
    if trees[0] != trees[1] or shapes[0] != shapes[1]:
        raise ValueError(
            f"{api}: comm_hook {name} returned a state of another form than it was given: "
            f"{trees[0]} with shapes {shapes[0]}, given {trees[1]} with {shapes[1]}. One program "
            "serves the whole run: keep structure and shapes (a state of another hook? init anew)."
        )
