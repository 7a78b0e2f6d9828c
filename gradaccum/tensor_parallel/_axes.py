"""What the operators and layers check of their operands: the manual axes, the split dimension."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gradaccum._mesh import AxisName, axis_tuple, is_typed, varying_axes


def check_axes(api: str, axis_name: AxisName) -> tuple[str, ...]:
    """Returns the axes, or raises ValueError unless they are different manual ones."""
    mesh = jax.sharding.get_abstract_mesh()
    # A number names an axis of a vmap: no device axis.
    axes = () if isinstance(axis_name, int) else axis_tuple(axis_name)
    # A repeated name would end the process in jax 0.12 (a failed check in XLA).
    if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(mesh.manual_axes):
        manual = ", ".join(f"{a}={mesh.shape[a]}" for a in mesh.manual_axes)
        raise ValueError(
            f"{api}: got axis_name={axis_name!r}, needed a manual axis of the mesh or a tuple of "
            f"different ones; {f'manual here: {manual}' if manual else 'no axis is manual here'}. "
            "Call it inside a jax.shard_map over that axis (in its axis_names, if they are given)."
        )
    return axes


def check_operand(api: str, x: ArrayLike, axis_name: AxisName) -> tuple[jax.Array, tuple[str, ...]]:
    """Returns an operand as an array, and the axes; raises TypeError for a tree of arrays."""
    axes = check_axes(api, axis_name)
    if isinstance(x, dict | list | tuple):
        raise TypeError(
            f"{api}: got a {type(x).__name__}, needed one array; jax.tree.map it over the leaves."
        )
    return jnp.asarray(x), axes


def dimension_of(api: str, x: jax.Array, axis: int, name: str = "axis") -> int:
    """Returns a dimension of x counted from the start, or raises ValueError.

    `name` is the argument's.
    """
    if not hasattr(axis, "__index__"):
        raise TypeError(f"{api}: got {name}={axis!r}, needed an int.")
    if not -x.ndim <= operator.index(axis) < x.ndim:
        needed = f"{-x.ndim} <= {name} < {x.ndim}" if x.ndim else "a rank of at least 1"
        raise ValueError(
            f"{api}: got {name}={axis} for x with shape {x.shape}, needed {needed}. Give the "
            "dimension that is split over the devices."
        )
    return operator.index(axis) % x.ndim


def check_splits(api: str, x: jax.Array, axis: int, axis_name: AxisName) -> None:
    """Raises ValueError unless the axes' devices divide a dimension."""
    d, m = x.shape[axis], jax.lax.axis_size(axis_tuple(axis_name))
    if d % m:
        raise ValueError(
            f"{api}: got x with shape {x.shape}; axis {axis} ({d}) is not divisible by the "
            f"{m} devices along axis_name={axis_name!r}. Pad it to {padded(d, m)} and mask what "
            f"was added, or take a number of devices that divides {d}."
        )


def padded(size: int, multiple: int) -> int:
    """Returns the next multiple that holds the size."""
    return -(-size // multiple) * multiple


def check_sharded(api: str, name: str, x: jax.Array, axes: tuple[str, ...], what: str) -> None:
    """Raises ValueError where x's type (`check_vma=True`) says that all devices hold the same."""
    same = [a for a in axes if jax.lax.axis_size(a) > 1 and a not in varying_axes(x)]
    if same and is_typed(axes):
        raise ValueError(
            f"{api}: got {name} with shape {x.shape} that is the same on all devices of "
            f"{', '.join(same)}, needed this device's {what}. Split it over that axis in the "
            "in_specs of the shard_map."
        )
