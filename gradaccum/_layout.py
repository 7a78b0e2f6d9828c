"""How each array leaf of a call, and its gradient, lie on the mesh; and what cannot be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import PartitionSpec

from gradaccum._arguments import Arguments, Role
from gradaccum._mesh import DataMesh, describe
from gradaccum._specs import Dims, Specs, dims_of, only, spec_of

Pairs = tuple[tuple[int, str], ...]  # (dimension, mesh axis)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one array leaf and its gradient lie on the mesh. The default: replicated.

    Attributes:
      given: the user gave a spec for the leaf or for its gradient.
      dims: the manual axes of each dimension of the leaf, as it enters the manual region.
      grad_dims: those of its gradient as it leaves.
      constraint: how the leaf lies before it enters, where that is more than `dims`.
      gathered: along what the leaf is gathered in the region, in that order.
      scattered: along what its gradient is reduce-scattered, in that order.
      sliced: along what its gradient is cut after the all-reduce.
      automatic: the automatic model axes of each dimension of the gradient, those that are known.
    """

    given: bool = False
    dims: Dims = ()
    grad_dims: Dims = ()
    constraint: PartitionSpec | None = None
    gathered: Pairs = ()
    scattered: Pairs = ()
    sliced: Pairs = ()
    automatic: Dims = ()

    def replicated(self, axis_names: Sequence[str]) -> tuple[str, ...]:
        """Returns the data axes that the leaf is not gathered over: the same on all of them."""
        gathered = {a for _, a in self.gathered}
        return tuple(a for a in axis_names if a not in gathered)

    def summed(self, axis_names: Sequence[str]) -> tuple[str, ...]:
        """Returns the data axes that the gradient is all-reduced over, after its scatters."""
        scattered = {a for _, a in self.scattered}
        return tuple(a for a in axis_names if a not in scattered)


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts of a call's array leaves, and what becomes of the model axes."""

    leaves: tuple[Layout, ...]
    manual: tuple[str, ...] = ()  # those that `in_specs` names
    automatic: tuple[str, ...] = ()  # the others, of more than one device


@dataclasses.dataclass(frozen=True)
class _Leaf:
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

    def both(self) -> tuple[tuple[str, Dims], tuple[str, Dims]]:
        return ("in_specs", self.dims), ("grad_specs", self.grad_dims)

    def say(self, name: str, why: str) -> str:
        spec = self.spec if name == "in_specs" or self.grad_spec is None else self.grad_spec
        return f"{name} of {self.path}, shape {self.shape}, is {spec}: {why}"


def lay_out(
    api: str,
    specs: tuple[Specs, Specs],
    form: Arguments,
    fun: Callable[..., Any],
    where: DataMesh,
    arrays: Sequence[Any],
) -> Layouts:
    """Lays out every array leaf of a call.

    Args:
      api: the public name to start error messages with.
      specs: `in_specs` and `grad_specs`.
      form: the call's form.
      fun: the loss.
      where: the mesh and its data axes.
      arrays: the array leaves, local ones where the data axes are manual already.

    Raises:
      ValueError: the specs do not fit the mesh, the leaves or each other; all bad leaves at once.
    """
    if not where.axis_names:  # one device without a mesh: every spec is kept
        return Layouts((Layout(),) * len(arrays))
    in_specs, grad_specs = (s.of_leaves(api, form, fun) for s in specs)
    leaves, owners = [], form.owners()
    for i, (path, x) in enumerate(zip(form.paths(fun), arrays, strict=True)):
        broadcast = form.is_batch[owners[i]] and x.ndim == 0  # a prefix of the batch's names it
        given = (None, None) if broadcast else (in_specs[i], grad_specs[i])
        explicit = dims_of(jax.typeof(x).sharding.spec)
        leaves.append(
            _Leaf(path, form.roles[i], tuple(x.shape), explicit, *given, where.axis_names)
        )
    data, outer = set(where.axis_names), set(where.manual_axes)
    _check_specs(api, leaves, where)
    model = {a for leaf in leaves for d in leaf.dims for a in d} - data
    _check_model_axes(api, leaves, where, model)
    known = data | model | outer
    automatic = tuple(a for a, size in where.sizes if a not in known and size > 1)
    told = {a for leaf in leaves for d in leaf.grad_dims for a in d} - known
    manual = tuple(a for a, _ in where.sizes if a in model - outer)
    laid_out = tuple(_layout(leaf, where, manual, automatic, told) for leaf in leaves)
    _check_dimensions(api, leaves, laid_out)
    return Layouts(laid_out, manual, automatic)


def _pairs(dims: Dims) -> Pairs:
    """Returns every (dimension, axis), the major axis of a dimension first."""
    return tuple((i, a) for i, d in enumerate(dims) for a in d)


def _layout(
    leaf: _Leaf,
    where: DataMesh,
    manual: Sequence[str],
    automatic: Sequence[str],
    told: set[str],
) -> Layout:
    """Lays out one leaf.

    `psum_scatter` and `all_gather` beside an automatic axis would gather the leaf over that axis
    first. So there the partitioner gathers the leaf, before the region; and its gradient is
    scattered inside a further region, manual over the automatic axes too, if the leaf's layout
    over them is known, and else all-reduced and cut. It is known of Explicit axes, and of those
    that some spec of a gradient names (`told`), if this leaf's own spec was given.
    """
    data = where.axis_names
    region = () if where.manual else (*data, *manual)
    if leaf.role is Role.BATCH:
        return Layout(True, only(leaf.dims, region), only(leaf.grad_dims, region))
    gathered = tuple(reversed(_pairs(only(leaf.dims, data))))
    cut = _pairs(only(leaf.grad_dims, data))
    said = only(leaf.grad_dims, automatic)
    unknown = set(automatic) - set(where.explicit_axes)
    scatters = not unknown or (leaf.grad_spec is not None and unknown <= told)
    before = bool(gathered and automatic and not where.manual)
    unconstrained = PartitionSpec.UNCONSTRAINED
    return Layout(
        given=leaf.spec is not None or leaf.grad_spec is not None,
        dims=only(leaf.dims, manual if before else region),
        grad_dims=only(leaf.grad_dims, region),
        constraint=spec_of(only(leaf.dims, region), unconstrained) if before else None,
        gathered=() if before else gathered,
        scattered=cut if scatters else (),
        sliced=() if scatters else cut,
        automatic=said if any(said) else only(leaf.explicit, automatic),
    )


def _raise(api: str, complaints: Sequence[str], remedy: str) -> None:
    if complaints:
        raise ValueError(f"{api}: {'; '.join(complaints)}. {remedy}")


def _check_specs(api: str, leaves: Sequence[_Leaf], where: DataMesh) -> None:
    """Each spec by itself: axes, rank, divisibility, and the batch's axis 0."""
    sizes = dict(where.sizes)
    given = [(leaf, name, spec) for leaf in leaves for name, spec in leaf.given()]
    unknown = [
        leaf.say(name, f"the mesh has no axis {', '.join(map(repr, bad))}")
        for leaf, name, spec in given
        if (bad := [a for d in dims_of(spec) for a in d if a not in sizes])
    ]
    _raise(api, unknown, f"The mesh's axes are {describe(where.sizes)}.")
    twice = [
        leaf.say(name, "an axis is named twice")
        for leaf, name, spec in given
        if len(named := [a for d in dims_of(spec) for a in d]) > len(set(named))
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


def _check_batch(api: str, leaves: Sequence[_Leaf], where: DataMesh) -> None:
    data = where.axis_names
    spec = PartitionSpec(data if len(data) > 1 else data[0])
    bad = [
        leaf.say(name, "the data axes split axis 0 of a batch, all of them and nothing else")
        for leaf in leaves
        for name, dims in leaf.both()
        if leaf.role is Role.BATCH
        and (dims[0] != data or set(data) & {a for d in dims[1:] for a in d} or dims != leaf.dims)
    ]
    _raise(api, bad, f"Give {spec} (and model axes on other dimensions), the same in both.")


def _check_divisible(api: str, leaves: Sequence[_Leaf], where: DataMesh) -> None:
    sizes, outer = dict(where.sizes), set(where.manual_axes)
    bad = []
    for leaf in leaves:
        # In an outer region the shapes are local: what is gathered there is larger.
        shape = [
            size * math.prod(sizes[a] for a in axes if where.manual and a in where.axis_names)
            for size, axes in zip(leaf.shape, leaf.dims, strict=True)
        ]
        for name, dims in leaf.both():
            if name == "grad_specs" and leaf.grad_spec is None:
                continue
            for i, axes in enumerate(dims):
                if leaf.role is Role.BATCH and i == 0:  # microbatches count there too
                    continue
                axes = tuple(a for a in axes if a not in outer or a in where.axis_names)
                if shape[i] % math.prod(sizes[a] for a in axes):
                    factors = " * ".join(f"{a} {sizes[a]}" for a in axes)
                    bad.append(
                        leaf.say(name, f"axis {i} ({shape[i]}) does not divide by {factors}")
                    )
    _raise(
        api, bad, "Split another dimension, leave them replicated, PartitionSpec(), or pad them."
    )


def _check_model_axes(api: str, leaves: Sequence[_Leaf], where: DataMesh, model: set[str]) -> None:
    """Model axes: manual where they can be, the same of a gradient, and major to data axes."""
    if where.manual:
        open_axes = model - set(where.manual_axes)
        bad = [
            leaf.say("in_specs", "not manual in the outer shard_map")
            for leaf in leaves
            if open_axes & {a for d in leaf.dims for a in d}
        ]
        _raise(api, bad, f"Make {', '.join(sorted(open_axes))} manual there.")
    minor = [
        leaf.say(name, "a data axis before a model axis in one dimension")
        for leaf in leaves
        for name, dims in leaf.both()
        if any(a in where.axis_names and b in model for axes in dims for a, b in pairwise(axes))
    ]
    _raise(api, minor, "The gathered part would be no shard of the model axis: name that first.")
    moved = [
        leaf.say("grad_specs", f"its model axes are not those of in_specs, {spec_of(leaf.dims)}")
        for leaf in leaves
        if only(leaf.grad_dims, model) != only(leaf.dims, model)
    ]
    _raise(api, moved, "Only data axes can be added: a gradient lies on model axes as its leaf.")


def _check_dimensions(api: str, leaves: Sequence[_Leaf], layouts: Sequence[Layout]) -> None:
    """A data axis and an automatic model axis on one dimension: the parts would be permuted."""
    bad = []
    for leaf, layout in zip(leaves, layouts, strict=True):
        cut = {i for _, dims in leaf.both() for i, _ in _pairs(only(dims, leaf.data_axes))}
        for i, axes in enumerate(() if leaf.role is Role.BATCH else layout.automatic):
            if axes and i in cut:
                name = "in_specs" if leaf.grad_spec is None else "grad_specs"
                why = f"axis {i} is split over {', '.join(axes)} too, an automatic model axis"
                bad.append(leaf.say(name, why))
    _raise(api, bad, "Put the data axis on another dimension, or name the model axis in in_specs.")
