"""What is checked of `Unreduced` values and of the gradients that `MultiSteps` is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gradaccum._mesh import DataMesh, describe


def check_all_unreduced(api: str, others: Mapping[str, Any]) -> None:
    """Raises TypeError if there are leaves that are no `Unreduced`."""
    if others:
        listed = ", ".join(f"{path} is {kind_of(x)}" for path, x in others.items())
        raise TypeError(
            f"{api}: {listed}; every leaf must be a gradaccum.Unreduced, as "
            "gradaccum.unreduced_value_and_grad returns them."
        )


def check_untouched(api: str, touched: Sequence[str]) -> None:
    """Raises TypeError if there are `Unreduced` values that something has computed with."""
    if touched:
        raise TypeError(
            f"{api}: {', '.join(touched)}: the parts of this gradaccum.Unreduced do not belong "
            "together: a transformation has computed with its rows, which is not computing with "
            "their mean. Put it after the mean: inside MultiSteps, or after all_reduce_mean. "
            "(Values that a scan stacked: jax.vmap(gradaccum.mean).)"
        )


def check_same_axes(api: str, axes: Mapping[str, Any]) -> None:
    """Raises ValueError if there are `Unreduced` values of different data axes."""
    if len(set(axes.values())) > 1:
        listed = ", ".join(f"{path} over {a!r}" for path, a in axes.items())
        raise ValueError(
            f"{api}: values of different data axes: {listed}. Give the same axis_name wherever "
            "they are made."
        )


def check_rows(api: str, rows: set[int], where: DataMesh) -> None:
    """Raises ValueError unless there is one row a data device (one, where they are manual)."""
    needed = 1 if where.manual else where.size
    if rows != {needed}:
        got = ", ".join(map(str, sorted(rows)))
        axes = describe((a, n) for a, n in where.sizes if a in where.axis_names)
        place = (
            "inside a shard_map over the data axes each device has 1"
            if where.manual
            else (f"the data axes {axes} need {needed}")
        )
        raise ValueError(
            f"{api}: an Unreduced of {got} rows; {place}. Take the mean on the mesh that it was "
            "made on."
        )


def check_addends(tree: Any, other: Any, left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Raises ValueError unless two trees have the same structure, shapes and awaited means."""
    if tree != other:
        raise ValueError(
            f"add: the trees differ in structure: {tree} and {other}. Add the same values of "
            "two calls."
        )
    pairs = [(path, a, right[path]) for path, a in left.items()]
    shapes = [
        f"{path} {tuple(a.sum.shape)} and {tuple(b.sum.shape)}"
        for path, a, b in pairs
        if a.sum.shape != b.sum.shape
    ]
    if shapes:
        raise ValueError(
            f"add: rows of different shapes: {', '.join(shapes)}; required: the same, one row a "
            "data device."
        )
    others = [
        f"{path} {a!r} and {b!r}"
        for path, a, b in pairs
        if a.awaited != dataclasses.replace(b.awaited, scale=a.awaited.scale)
    ]
    if others:
        raise ValueError(
            f"add: values whose means are taken differently: {'; '.join(others)}. Add what was "
            "made with the same options, in the same place."
        )


def check_made(sums: Any, weight: Any) -> None:
    """Raises unless an `Unreduced` can be made of the two by hand."""
    if not jnp.issubdtype(sums.dtype, jnp.number):
        raise TypeError(f"Unreduced: sum is {kind_of(sums)}; it must hold numbers.")
    if sums.ndim < 1 or np.shape(weight) != sums.shape[:1]:
        raise ValueError(
            f"Unreduced: sum has shape {tuple(sums.shape)} and weight {np.shape(weight)}; "
            "required: [n, *shape] and [n], one row a data device."
        )


def kind_of(x: Any) -> str:
    """Returns what a value is, for a message."""
    shape = getattr(x, "shape", None)
    return f"a {type(x).__name__}" if shape is None else f"an array {x.dtype}{list(shape)}"


def check_no_batch_gradient(paths: Sequence[str]) -> None:
    """Raises ValueError if gradients of batch leaves are to be left unreduced."""
    if paths:
        raise ValueError(
            f"unreduced_value_and_grad: argnums asks for the gradient of {', '.join(paths)}, which "
            "batch_argnums splits: it belongs to one device, and has no mean to await. Take it "
            "from the loss that gradaccum.accumulate decorates."
        )


def check_no_rows(api: str, paths: Sequence[str]) -> None:
    """Raises TypeError if there are `Unreduced` gradients where no data axis is named."""
    if paths:
        raise TypeError(
            f"{api}: {', '.join(paths)}: an Unreduced value, but axis_name was not given. Give "
            "the data axes, as to unreduced_value_and_grad: MultiSteps(..., axis_name=...)."
        )


def check_manual(api: str, where: DataMesh, paths: Sequence[str]) -> None:
    """Raises TypeError for plain gradients where the data axes are not manual."""
    if not where.manual:
        axes = ", ".join(map(repr, where.axis_names)) or "no axis"
        raise TypeError(
            f"{api}: {', '.join(paths)}: a plain gradient, but axis_name was given and {axes} is "
            "not manual here. Outside a shard_map over the data axes give what "
            "gradaccum.unreduced_value_and_grad returns. Gradients that are averaged already "
            "want MultiSteps without axis_name."
        )


def check_unsummed(api: str, paths: Sequence[str], where: DataMesh) -> None:
    """Raises TypeError for gradients that are the same on all data devices by their type."""
    if paths:
        axes = where.axis_names if len(where.axis_names) > 1 else repr(where.axis_names[0])
        raise TypeError(
            f"{api}: {', '.join(paths)}: not this device's gradient: under check_vma=True JAX has "
            f"summed it over {axes} already, once a call, as the parameters do not vary over it. "
            f"Differentiate with respect to jax.lax.pcast(params, {axes}, to='varying'), or use "
            "gradaccum.unreduced_value_and_grad."
        )
