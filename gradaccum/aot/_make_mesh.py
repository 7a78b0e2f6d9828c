"""A mesh of given devices, slices outermost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh


def sizes(axes: Mapping[str, int]) -> str:
    """`dp=4 * mp=2 = 8`, for messages."""
    product = " * ".join(f"{name}={size}" for name, size in axes.items())
    return product if len(axes) == 1 else f"{product} = {math.prod(axes.values())}"


def check_axes(api: str, axes: Mapping[str, int]) -> None:
    """Raise TypeError or ValueError unless `axes` are names with sizes of at least 1."""
    if not isinstance(axes, Mapping):
        raise TypeError(
            f"{api}: axes is {axes!r}, a {type(axes).__name__}. Required: a mapping of axis names "
            "to sizes, in order. Write for example {'dp': 8}."
        )
    bad = [
        name
        for name, size in axes.items()
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int)
    ]
    if bad or not axes or min(axes.values()) < 1:
        raise ValueError(
            f"{api}: axes is {dict(axes)!r}. Required: at least one axis, names str, sizes int "
            "of at least 1. Write for example {'dp': 8}."
        )


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """Arrange devices as `jax.make_mesh` does, over several slices with the first axis outermost.

    Within a slice the order follows the network, so that neighbours in the mesh are neighbours
    there, and where no axis fits a torus dimension, dimensions are split. Slices, which are joined
    by a slower network (DCN), lie along the first axis, and along the next where the first is
    smaller than their number: {"replica": 2, "dp": 8} or {"dp": 16} over two slices of 8.
    Positions are slice-major, as `gradaccum.audit` reads them.

    Args:
      axes: sizes by name, major to minor. Their product is the number of devices.
      devices: here (`jax.devices()`) or not (of `jax.experimental.topologies`).

    Returns:
      A mesh whose axes have the type Auto.

    Raises:
      TypeError: axes is no mapping.
      ValueError: a size is below 1, the axes do not take all devices, or the slices cannot be
        laid along the first axes.

    Cost:
      Nothing runs on a device.

    Example:
      >>> import jax
      >>> from gradaccum import aot
      >>> mesh = aot.make_mesh({"dp": 4, "mp": 2}, jax.devices())
      >>> dict(mesh.shape)
      {'dp': 4, 'mp': 2}

    References:
      `jax.experimental.mesh_utils.create_hybrid_device_mesh`.
    """
    api = "aot.make_mesh"
    check_axes(api, axes)
    return arrange(api, axes, devices)


def arrange(api: str, axes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """As `make_mesh`, in the words of whoever is called."""
    if math.prod(axes.values()) != len(devices):
        raise ValueError(
            f"{api}: axes {sizes(axes)} do not take the {len(devices)} devices given. Required: a "
            f"product of {len(devices)}. Change the sizes, or pass as many devices as they need."
        )
    slices = len({getattr(device, "slice_index", None) for device in devices})
    shape = tuple(axes.values())
    if slices == 1:
        array = _placed(mesh_utils.create_device_mesh, shape, devices)
    else:
        outer = _between(api, axes, slices, len(devices))
        inner = tuple(size // factor for size, factor in zip(shape, outer, strict=True))
        array = _placed(mesh_utils.create_hybrid_device_mesh, inner, outer, devices)
    return Mesh(array, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _between(api: str, axes: Mapping[str, int], slices: int, devices: int) -> tuple[int, ...]:
    """How many slices lie along each axis: along the first ones, which they fill."""
    left, outer = slices, []
    for size in axes.values():
        if left % size and size % left:
            raise ValueError(
                f"{api}: axes {sizes(axes)} cannot be laid over {slices} slices of "
                f"{devices // slices} devices. Required: the first axes are the ones between "
                f"slices, so that the first size divides {slices} or is divisible by it. Put the "
                f"data axis first, with a multiple of {slices}."
            )
        outer.append(min(left, size))
        left //= outer[-1]
    return tuple(outer)


def _placed(place: Callable[..., np.ndarray], *given: Any) -> np.ndarray:
    try:
        return place(*given)
    except NotImplementedError:  # no axis is a product of whole torus dimensions
        return place(*given, allow_split_physical_axes=True)
