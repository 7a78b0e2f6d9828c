"""What gradients a call was given: a plain tree, rows of `Unreduced`, or one device's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum import _unreduced_checks
from gradaccum._means import Awaited
from gradaccum._mesh import AxisName, DataMesh, axis_tuple, data_mesh, is_typed, vary, varying_axes
from gradaccum._unreduced import Unreduced, is_unreduced, where_of


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What was given to one call.

    Attributes:
      sums: one for each leaf: gradients, or rows of them `[n, *shape]`.
      tree: their structure.
      weights: what they count: of rows float32 `[n]` each, else one `[]`.
      awaited: how the mean of each is taken, and its dtype.
      where: the data axes of rows; None: gradients that are whole.
    """

    sums: list[jax.Array]
    tree: Any
    weights: list[jax.Array]
    awaited: tuple[Awaited, ...]
    where: DataMesh | None


def read(api: str, grads: Any, axis_name: AxisName | None, mesh: Any) -> Gradients:
    """Tells what gradients these are.

    Raises:
      TypeError: `Unreduced` without `axis_name`, or mixed with others; plain gradients with one
        that is not manual, or that JAX has summed over it already.
    """
    keyed, tree = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_unreduced)
    leaves = {jax.tree_util.keystr(path) or "the gradient": x for path, x in keyed}
    rows = {p: x for p, x in leaves.items() if is_unreduced(x)}
    if axis_name is None:
        _unreduced_checks.check_no_rows(api, list(rows))
        arrays = [jnp.asarray(x) for x in leaves.values()]
        awaited = tuple(Awaited(dtype=x.dtype) for x in arrays)
        return Gradients(arrays, tree, [jnp.ones((), jnp.float32)], awaited, None)
    if rows:
        _unreduced_checks.check_all_unreduced(
            api, {p: x for p, x in leaves.items() if p not in rows}
        )
        return _read_rows(api, rows, tree, axis_name, mesh)
    where = data_mesh(api, axis_name, mesh)
    if not leaves:
        return Gradients([], tree, [], (), where)
    _unreduced_checks.check_manual(api, where, list(leaves))
    return _read_local(api, {p: jnp.asarray(x) for p, x in leaves.items()}, tree, where)


def _read_rows(
    api: str, leaves: dict[str, Unreduced], tree: Any, axis_name: AxisName, mesh: Any
) -> Gradients:
    _unreduced_checks.check_untouched(api, [p for p, x in leaves.items() if not x.is_whole()])
    wanted = axis_tuple(axis_name)
    axes = {p: x.axis_name for p, x in leaves.items() if axis_tuple(x.axis_name) != wanted}
    some = list(leaves.values())
    if axes and set(axes.values()) != {None}:  # None: made on one device, without a mesh
        _unreduced_checks.check_same_axes(api, {"axis_name": axis_name, **axes})
    where = where_of(api, some, axis_name, mesh)
    awaited = tuple(_with_dtype(x) for x in some)
    return Gradients([x.sum for x in some], tree, [x.weight for x in some], awaited, where)


def _with_dtype(x: Unreduced) -> Awaited:
    """Returns what the mean is, of the sum's own dtype if made by hand: not the accumulator's."""
    if x.awaited.dtype is not None or not jnp.issubdtype(x.sum.dtype, jnp.inexact):
        return x.awaited
    return dataclasses.replace(x.awaited, dtype=x.sum.dtype)


def _read_local(api: str, leaves: dict[str, jax.Array], tree: Any, where: DataMesh) -> Gradients:
    """Reads one device's gradients, inside a manual region."""
    axes = where.axis_names
    if is_typed(axes):
        lacking = {p: varying_axes(x) for p, x in leaves.items()}
        _unreduced_checks.check_unsummed(
            api, [p for p, v in lacking.items() if not v.issuperset(axes)], where
        )
    weight = vary(jnp.ones((1,), jnp.float32), axes if is_typed(axes) else ())
    return Gradients(
        [x[None] for x in leaves.values()],
        tree,
        [weight] * len(leaves),
        tuple(Awaited(dtype=x.dtype) for x in leaves.values()),
        where,
    )
