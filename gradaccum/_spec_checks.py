"""What is checked of `in_specs` and `grad_specs`, leaf by leaf: every bad one in one message."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from itertools import pairwise

from jax.sharding import PartitionSpec

from gradaccum._arguments import Role
from gradaccum._mesh import DataMesh, describe
from gradaccum._specs import Dims, axes_in, dims_of, only, spec_of


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array leaf, and what was given for it."""

    path: str
    role: Role
    shape: tuple[int, ...]
    explicit: Dims  # the Explicit axes of its type
    spec: PartitionSpec | None
    grad_spec: PartitionSpec | None
    data_axes: tuple[str, ...]

    def given(self) -> list[tuple[str, PartitionSpec]]:
        named = (("in_specs", self.spec), ("grad_specs", self.grad_spec))
        return [(name, spec) for name, spec in named if spec is not None]

    def _padded(self, spec: PartitionSpec) -> Dims:
        return dims_of(spec) + ((),) * (len(self.shape) - len(dims_of(spec)))

    @property
    def dims(self) -> Dims:
        rows = PartitionSpec(self.data_axes if self.role is Role.BATCH else None)
        default = rows if self.shape else PartitionSpec()
        return self._padded(default if self.spec is None else self.spec)

    @property
    def grad_dims(self) -> Dims:
        return self.dims if self.grad_spec is None else self._padded(self.grad_spec)

    def both(self) -> list[tuple[str, Dims]]:
        """Returns how the leaf lies, and its gradient if that was said."""
        grads = [] if self.grad_spec is None else [("grad_specs", self.grad_dims)]
        return [("in_specs", self.dims), *grads]

    def say(self, name: str, why: str) -> str:
        spec = self.spec if name == "in_specs" else self.grad_spec
        return f"{name} of {self.path}, shape {self.shape}, is {spec}: {why}"


def _raise(api: str, complaints: Sequence[str], remedy: str) -> None:
    if complaints:
        raise ValueError(f"{api}: {'; '.join(complaints)}. {remedy}")


def check_specs(api: str, leaves: Sequence[Leaf], where: DataMesh) -> None:
    """Each spec by itself: axes, rank, divisibility, and the batch's axis 0."""
    sizes = dict(where.sizes)
    given = [(leaf, name, spec) for leaf in leaves for name, spec in leaf.given()]
    unknown = [
        leaf.say(name, f"the mesh has no axis {', '.join(map(repr, bad))}")
        for leaf, name, spec in given
        if (bad := [a for a in axes_in(dims_of(spec)) if a not in sizes])
    ]
    _raise(api, unknown, f"The mesh's axes are {describe(where.sizes)}.")
    twice = [
        leaf.say(name, "an axis is named twice")
        for leaf, name, spec in given
        if len(named := axes_in(dims_of(spec))) > len(set(named))
    ]
    _raise(api, twice, "An axis splits one dimension only.")
    long = [
        leaf.say(name, f"{len(spec)} dimensions, but the array's rank is {len(leaf.shape)}")
        for leaf, name, spec in given
        if len(spec) > len(leaf.shape)
    ]
    _raise(api, long, "Give such leaves a spec of their own, e.g. PartitionSpec().")
    _check_batch(api, leaves, where)
    _check_divisible(api, leaves, where)


def _check_batch(api: str, leaves: Sequence[Leaf], where: DataMesh) -> None:
    data = where.axis_names
    spec = PartitionSpec(data if len(data) > 1 else data[0])
    bad = [
        leaf.say(name, "the data axes split axis 0 of a batch, all of them and nothing else")
        for leaf in leaves
        for name, dims in leaf.both()
        if leaf.role is Role.BATCH
        and (dims != leaf.dims or dims[0] != data or set(data) & set(axes_in(dims[1:])))
    ]
    _raise(api, bad, f"Give {spec} (and model axes on other dimensions), the same in both.")


def _check_divisible(api: str, leaves: Sequence[Leaf], where: DataMesh) -> None:
    sizes, outer = dict(where.sizes), set(where.manual_axes)
    bad = []
    for leaf in leaves:
        # In an outer region the shapes are local: what is gathered there is larger.
        shape = [
            size * math.prod(sizes[a] for a in axes if where.manual and a in where.axis_names)
            for size, axes in zip(leaf.shape, leaf.dims, strict=True)
        ]
        for name, dims in leaf.both():
            for i, axes in enumerate(dims):
                if leaf.role is Role.BATCH and i == 0:  # microbatches count there too
                    continue
                axes = tuple(a for a in axes if a not in outer or a in where.axis_names)
                devices = math.prod(sizes[a] for a in axes)
                if shape[i] % devices:
                    product = " * ".join(axes) + " = "
                    if len(axes) > 1:
                        product += " * ".join(str(sizes[a]) for a in axes) + " = "
                    padded = -(-shape[i] // devices) * devices
                    why = (
                        f"axis {i} ({shape[i]}) is not divisible by {product}{devices} "
                        f"(padded: {padded})"
                    )
                    bad.append(leaf.say(name, why))
    remedy = "Split another dimension, leave them replicated, PartitionSpec(), or pad them."
    _raise(api, bad, remedy)


def check_model_axes(api: str, leaves: Sequence[Leaf], where: DataMesh, model: set[str]) -> None:
    """Model axes: manual where they can be, the same of a gradient, and major to data axes."""
    if where.manual:
        open_axes = model - set(where.manual_axes)
        bad = [
            leaf.say("in_specs", "not manual in the outer shard_map")
            for leaf in leaves
            if open_axes & set(axes_in(leaf.dims))
        ]
        _raise(api, bad, f"Make {', '.join(sorted(open_axes))} manual there.")
    minor = [
        leaf.say(name, "a data axis before a model axis in one dimension")
        for leaf in leaves
        for name, dims in leaf.both()
        for axes in only(dims, {*where.axis_names, *model})
        if any(a not in model and b in model for a, b in pairwise(axes))
    ]
    remedy = (
        "Write the model axis first, e.g. PartitionSpec(('mp', 'dp')): then the parts that are "
        "gathered over the data axis are together the device's shard of the model axis."
    )
    _raise(api, minor, remedy)
    moved = [
        leaf.say("grad_specs", f"its model axes are not those of in_specs, {spec_of(leaf.dims)}")
        for leaf in leaves
        if only(leaf.grad_dims, model) != only(leaf.dims, model)
    ]
    _raise(api, moved, "Only data axes can be added: a gradient lies on model axes as its leaf.")


def check_dimensions(api: str, leaves: Sequence[Leaf], automatic: Sequence[Dims]) -> None:
    """A data axis and an automatic model axis on one dimension: the parts would be permuted."""
    bad = [
        leaf.say(name, f"axis {i} is split over {', '.join(axes)} too, an automatic model axis")
        for leaf, axes_of in zip(leaves, automatic, strict=True)
        for name, dims in leaf.both()
        for i, axes in enumerate(axes_of)
        if axes and set(dims[i]) & set(leaf.data_axes)
    ]
    _raise(api, bad, "Put the data axis on another dimension, or name the model axis in in_specs.")


def check_local(api: str, leaves: Sequence[Leaf], varying: Sequence[Collection[str]]) -> None:
    """A leaf is split over what its spec says, where an outer region's types show it."""
    bad = [
        leaf.say("in_specs", f"but its type here is the same on all devices of {', '.join(same)}")
        for leaf, axes in zip(leaves, varying, strict=True)
        if (same := [a for a in axes_in(only(leaf.dims, leaf.data_axes)) if a not in axes])
    ]
    _raise(api, bad, "Inside an outer shard_map in_specs say how the arrays *are* split: as there.")
