"""Which mesh, which data axes, and how a value varies over them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable
from typing import Any, Final

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

AxisName = str | tuple[str, ...]


class Unset(enum.Enum):
    """An argument that was not given, where `None` has a meaning of its own."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "<unset>"


UNSET: Final = Unset.UNSET


@dataclasses.dataclass(frozen=True)
class DataMesh:
    """Where the data axes live: what one call needs to know of the mesh.

    Attributes:
      mesh: for `jax.shard_map`; None takes the context mesh.
      axis_names: the data axes, in the order of the batch's sharding; empty: no collective.
      size: n, the devices along them.
      manual: they are manual already, in an outer `jax.shard_map`.
      sizes: all axes of the mesh, with their sizes.
      manual_axes: those of an outer `jax.shard_map`.
      explicit_axes: the mesh's axes of type Explicit.
    """

    mesh: Mesh | AbstractMesh | None = None
    axis_names: tuple[str, ...] = ()
    size: int = 1
    manual: bool = False
    sizes: tuple[tuple[str, int], ...] = ()
    manual_axes: tuple[str, ...] = ()
    explicit_axes: tuple[str, ...] = ()


def axis_tuple(axis_name: AxisName | Unset | None) -> tuple[str, ...]:
    """Returns the axis names as a tuple, empty for None and unset."""
    if axis_name is None or isinstance(axis_name, Unset):
        return ()
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def axis_name_of(axes: tuple[str, ...]) -> AxisName | None:
    """Returns axis names as a user writes them: one alone as a str, none as None."""
    return axes[0] if len(axes) == 1 else axes or None


def describe(sizes: Iterable[tuple[str, int]]) -> str:
    """Returns the axes of a mesh for a message: `(dp=4, mp=2)`."""
    return "(" + ", ".join(f"{name}={size}" for name, size in sizes) + ")"


def _describe(mesh: Mesh | AbstractMesh) -> str:
    return describe(mesh.shape.items())


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def check_axes(api: str, axis_name: AxisName | Unset | None, mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError if an axis is not one of the mesh's."""
    unknown = [a for a in axis_tuple(axis_name) if a not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"{api}: axis_name has {', '.join(map(repr, unknown))}, but the mesh's axes are "
            f"{_describe(mesh)}. Name the axes that the batch is split over."
        )


_GIVE_MESH = (
    "Give mesh=..., or call inside `with jax.set_mesh(mesh):` (a legacy `with mesh:` cannot be "
    "seen); or give axis_name=None for no cross-device mean at all."
)


def data_mesh(
    api: str,
    axis_name: AxisName | Unset | None,
    mesh: Mesh | AbstractMesh | None,
    remedy: str = "",
) -> DataMesh:
    """Finds the mesh and the data axes of one call.

    Args:
      api: the public name to start error messages with.
      axis_name: the data axes; None for no collective; unset for the mesh's only axis.
      mesh: the mesh given at decoration, or None for the context's.
      remedy: what to do without a mesh, where that is not to give one here.

    Returns:
      The `DataMesh`. An outer `shard_map` comes before `mesh`, which comes before `jax.set_mesh`.

    Raises:
      ValueError: no mesh with several devices, an unknown axis, an axis left to guess among
        several, or data axes of which only some are manual.
    """
    if axis_name is None:
        return DataMesh()
    context = jax.sharding.get_abstract_mesh()
    if mesh is None or context.manual_axes or _abstract(mesh) == context:
        found: Mesh | AbstractMesh = context
    elif context.axis_names:
        raise ValueError(
            f"{api}: mesh={_describe(mesh)} was given at decoration, but the mesh of jax.set_mesh "
            f"is {_describe(context)}, or has other axis types. Give one of the two, or the same."
        )
    else:
        found = mesh
    if not found.axis_names:
        if jax.device_count() == 1:
            return DataMesh()
        raise ValueError(
            f"{api}: no mesh, and {jax.device_count()} devices. " + (remedy or _GIVE_MESH)
        )
    check_axes(api, axis_name, found)
    axes = axis_tuple(axis_name)
    if isinstance(axis_name, Unset):
        if len(found.axis_names) > 1:
            raise ValueError(
                f"{api}: the mesh has {len(found.axis_names)} axes, {_describe(found)}. Give "
                "axis_name, the axis or axes that the batch is split over."
            )
        axes = tuple(found.axis_names)
    manual = [a for a in axes if a in context.manual_axes]
    if manual and len(manual) < len(axes):
        raise ValueError(
            f"{api}: of the data axes {', '.join(axes)}, only {', '.join(manual)} "
            "is manual in the outer shard_map. Make all of them manual there, or none."
        )
    size = math.prod(found.shape[a] for a in axes)
    types = zip(found.axis_names, found.axis_types, strict=True)
    explicit = tuple(name for name, kind in types if kind == jax.sharding.AxisType.Explicit)
    passed = None if found is context else found
    return DataMesh(
        mesh=passed,
        axis_names=axes,
        size=size,
        manual=bool(manual),
        sizes=tuple(found.shape.items()),
        manual_axes=tuple(a for a in found.axis_names if a in context.manual_axes),
        explicit_axes=explicit,
    )


def mesh_of(tree: Any, axis_name: AxisName | None = None) -> Mesh | None:
    """Returns the mesh that concrete arrays lie on and that has the axes; None without one."""
    for x in jax.tree.leaves(tree):
        sharding = getattr(x, "sharding", None) if not isinstance(x, jax.core.Tracer) else None
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and set(axis_tuple(axis_name)) <= set(mesh.axis_names):
            return mesh
    return None


def find_mesh(api: str, axis_name: AxisName, mesh: Any, *trees: Any, remedy: str = "") -> DataMesh:
    """Finds the data axes of a call: on the mesh given, the context's, or else the arrays' own."""
    if mesh is None and not jax.sharding.get_abstract_mesh().axis_names:
        mesh = next((m for t in trees if (m := mesh_of(t, axis_name)) is not None), None)
    return data_mesh(api, axis_name, mesh, remedy)


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the manual axes that `x`, an array or its type, varies over; none where unchecked."""
    kind = getattr(x if hasattr(x, "manual_axis_type") else jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def is_typed(axis_names: Iterable[str]) -> bool:
    """True inside a `shard_map` with `check_vma=True`, where values have varying axes."""
    return any(varying_axes(jax.lax.axis_index(a)) for a in axis_names)


def vary(x: jax.Array, axis_names: Iterable[str]) -> jax.Array:
    """Casts `x` to vary over the axes too (`check_vma=True`); nothing to do otherwise."""
    missing = tuple(a for a in axis_names if a not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
