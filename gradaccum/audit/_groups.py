"""Replica groups: every notation of XLA to groups of devices, and those to mesh axes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from gradaccum.audit._parse import split

Groups: TypeAlias = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"^\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"^@?mesh\[(?P<axes>[^\]]*)\](?:,\s*device_ids=\((?P<ids>.*?)\))?\s*\{(?P<group>.*)\}$"
)
_AXIS = re.compile(r"^['\"]?(?P<name>.+?)['\"]?=(?P<size>\d+)$")
_AXIS_REF = re.compile(r"^['\"]?(?P<name>.+?)['\"]?(?::\((?P<pre>\d+)\)(?P<size>\d+))?$")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def _iota(text: str) -> np.ndarray:
    """Expand `[4,2]<=[2,4]T(1,0)`; without `<=` the array itself is reshaped then transposed."""
    match = _IOTA.match(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"audit: not an iota device list: {text[:80]!r}")
    dims = _integers(match[1])
    reshape = _integers(match[2]) if match[2] else dims
    order = _integers(match[3]) if match[3] else tuple(range(len(reshape)))
    ids = np.arange(math.prod(reshape)).reshape(reshape).transpose(order)
    # `device_ids=([2,4]T(1,0))` has no dims of its own: its order is all that counts.
    return ids.reshape(dims) if match[2] else ids.reshape(-1)


def mesh_clause(text: str) -> dict[str, int]:
    """Axis names and sizes of a `mesh['dp'=4,'mp'=2] {...}` clause; empty for other notations."""
    match = _MESH.match(text.strip())
    if match is None:
        return {}
    axes = [_AXIS.match(part) for part in split(match["axes"])]
    return {axis["name"]: int(axis["size"]) for axis in axes if axis}


def _mesh_groups(match: re.Match[str], text: str) -> Groups:
    """Expand `mesh['a'=4,'b'=2], device_ids=(...) {'a':(2)2,'b'}`, axes in the order named.

    `'a':(pre)size` is a part of axis a: a is split into (pre, size, rest), major to minor, and
    the part in the middle is meant.
    """
    axes = mesh_clause(text)
    ids = _iota(match["ids"]) if match["ids"] and "[" in match["ids"] else None
    if ids is None:
        listed = _integers(match["ids"] or "")
        ids = np.array(listed) if listed else np.arange(math.prod(axes.values()))
    refs = [ref for part in split(match["group"]) if (ref := _AXIS_REF.match(part))]
    # Cut every axis at all the boundaries that any reference to it needs.
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in axes.items()}
    spans: list[tuple[str, int, int]] = []
    for ref in refs:
        pre = int(ref["pre"] or 1)
        size = int(ref["size"] or axes[ref["name"]])
        spans.append((ref["name"], pre, pre * size))
        cuts[ref["name"]] |= {pre, pre * size}
    shape: list[int] = []
    position: dict[tuple[str, int], int] = {}
    for name in axes:
        for low, high in itertools.pairwise(sorted(cuts[name])):
            position[name, low] = len(shape)
            shape.append(high // low)
    grouped = [
        at
        for name, low, high in spans
        for (axis, start), at in position.items()
        if axis == name and low <= start < high
    ]
    others = [at for at in range(len(shape)) if at not in grouped]
    table = ids.reshape(shape).transpose(others + grouped)
    width = math.prod(shape[at] for at in grouped)
    return tuple(tuple(int(i) for i in row) for row in table.reshape(-1, width))


def parse_groups(text: str) -> Groups:
    """Expand a `replica_groups` attribute in any notation of XLA.

    Args:
      text: `{{0,1},{2,3}}`, `{}`, `[4,2]<=[8]`, `[4,2]<=[2,4]T(1,0)`, or
        `mesh['dp'=4,'mp'=2] {'dp'}`, with `device_ids=(...)` and parts of axes (`'dp':(2)2`).

    Returns:
      The groups, ids in the order of the text; empty for `{}` (which means: everyone).

    Raises:
      ValueError: the text is none of these.
    """
    text = text.strip()
    if match := _MESH.match(text):
        return _mesh_groups(match, text)
    if text.startswith("["):
        return tuple(tuple(int(i) for i in row) for row in _iota(text))
    if not re.fullmatch(r"\{[\d,\s{}]*\}", text):
        raise ValueError(f"audit: not a notation of replica groups: {text[:80]!r}")
    return tuple(
        ids
        for part in re.findall(r"\{([\d,\s]*)\}", text.strip()[1:-1])
        if (ids := _integers(part))
    )


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Name the mesh axes along which members of one group differ.

    Args:
      groups: device indices, in the order of the mesh's devices.
      mesh: axis name -> size, major to minor.

    Returns:
      The axes, in mesh order; also for groups that cover only a part of an axis.
    """
    names, sizes = tuple(mesh), tuple(mesh.values())
    varying: set[int] = set()
    for group in groups:
        coordinates = np.array(np.unravel_index(np.asarray(group), sizes))
        varying |= {int(i) for i in np.flatnonzero(np.ptp(coordinates, axis=1))}
    return tuple(name for i, name in enumerate(names) if i in varying)


def shared_axes(one: Groups, other: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Name the axes along which two groupings both connect the same pair of devices.

    What one sums along such an axis, the other sums again: none for `replica` after `dp`, `dp`
    for `dp` after `(replica, dp)`.
    """
    group_of: dict[int, list[int]] = {}
    for i, group in enumerate(one):
        for device in group:
            group_of.setdefault(device, []).append(i)
    together: list[tuple[int, ...]] = []
    for group in other:
        meeting: dict[int, set[int]] = {}
        for device in group:
            for i in group_of.get(device, ()):
                meeting.setdefault(i, set()).add(device)
        together += [tuple(devices) for devices in meeting.values() if len(devices) > 1]
    return axes_of(tuple(together), mesh)


def joined_axes(groupings: Iterable[Groups], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Name the axes along which all devices are connected, through one grouping or several.

    A reduction within halves of `dp` followed by one between the halves connects `dp`; either
    alone does not.
    """
    sizes = tuple(mesh.values())
    parent = np.arange(math.prod(sizes))

    def find(device: int) -> int:
        while parent[device] != device:
            parent[device] = parent[parent[device]]
            device = int(parent[device])
        return device

    for groups in groupings:
        for group in groups:
            for device in group[1:]:
                parent[find(device)] = find(group[0])
    component = np.array([find(device) for device in range(len(parent))]).reshape(sizes)
    return tuple(
        name for i, name in enumerate(mesh) if (component == component.take([0], axis=i)).all()
    )
