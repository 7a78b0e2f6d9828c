"""How each array leaf of a call, and its gradient, lie on the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from gradaccum._arguments import Arguments, Role
from gradaccum._mesh import DataMesh, is_typed, varying_axes
from gradaccum._spec_checks import (
    Leaf,
    check_dimensions,
    check_local,
    check_model_axes,
    check_specs,
)
from gradaccum._specs import Dims, Specs, axes_in, dims_of, only, spec_of

Pairs = tuple[tuple[int, str], ...]  # (dimension, mesh axis)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one array leaf and its gradient lie on the mesh. The default: replicated.

    Attributes:
      placed: the gradient lies by `grad_dims`; False: as the leaf's own type says.
      dims: the manual axes of each dimension of the leaf, as it enters the manual region.
      grad_dims: those of its gradient as it leaves.
      constraint: how the leaf is laid out before it enters, for the partitioner to gather it there.
      gathered: the (dimension, axis) pairs that the leaf is gathered along in the region, in order.
      scattered: those that its gradient is reduce-scattered along, in order.
      sliced: those that its gradient is cut along after the all-reduce, in order.
      automatic: the automatic model axes of each dimension of the gradient, those that are known.
    """

    placed: bool = False
    dims: Dims = ()
    grad_dims: Dims = ()
    constraint: PartitionSpec | None = None
    gathered: Pairs = ()
    scattered: Pairs = ()
    sliced: Pairs = ()
    automatic: Dims = ()

    @property
    def cut(self) -> Pairs:
        """The (dimension, axis) pairs that the gradient is split along after its reduction."""
        return self.scattered + self.sliced

    def globally(self) -> Layout:
        """Returns how the gradient is laid out outside the manual region: split by its cuts too."""
        cut = self.cut
        last = max((d for d, _ in cut), default=-1)
        dims = self.grad_dims + ((),) * (last + 1 - len(self.grad_dims))
        split = tuple((*own, *(a for i, a in cut if i == d)) for d, own in enumerate(dims))
        return dataclasses.replace(self, grad_dims=split)

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
    # Each axis that `in_specs` names, manual here or in an outer region: which leaves it splits.
    splits: tuple[tuple[str, tuple[bool, ...]], ...] = ()


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
    in_specs, grad_specs = (s.of_leaves(api, form, fun) for s in specs)
    if not where.axis_names:  # one device without a mesh: nothing to split
        return Layouts(
            tuple(
                Layout(placed=a is not None or b is not None)
                for a, b in zip(in_specs, grad_specs, strict=True)
            )
        )
    leaves, owners = [], form.owners()
    for i, (path, x) in enumerate(zip(form.paths(fun), arrays, strict=True)):
        broadcast = form.is_batch[owners[i]] and x.ndim == 0  # a prefix of the batch's names it
        given = (None, None) if broadcast else (in_specs[i], grad_specs[i])
        explicit = dims_of(jax.typeof(x).sharding.spec)
        leaves.append(Leaf(path, form.roles[i], tuple(x.shape), explicit, *given, where.axis_names))
    data, outer = set(where.axis_names), set(where.manual_axes)
    check_specs(api, leaves, where)
    model = {a for leaf in leaves for a in axes_in(leaf.dims)} - data
    check_model_axes(api, leaves, where, model)
    if where.manual and is_typed(where.axis_names):
        check_local(api, leaves, [varying_axes(x) for x in arrays])
    known = data | model | outer
    automatic = tuple(a for a, size in where.sizes if a not in known and size > 1)
    told = {a for leaf in leaves for a in axes_in(leaf.grad_dims)} - known
    manual = tuple(a for a, _ in where.sizes if a in model - outer)
    laid_out = tuple(_layout(leaf, where, manual, automatic, told) for leaf in leaves)
    check_dimensions(api, leaves, [layout.automatic for layout in laid_out])
    splits = tuple(
        (a, tuple(a in axes_in(leaf.dims) for leaf in leaves)) for a, _ in where.sizes if a in model
    )
    return Layouts(laid_out, manual, automatic, splits)


def _pairs(dims: Dims) -> Pairs:
    """Returns every (dimension, axis), the major axis of a dimension first."""
    return tuple((i, a) for i, d in enumerate(dims) for a in d)


def _layout(
    leaf: Leaf,
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
        placed=leaf.spec is not None or leaf.grad_spec is not None,
        dims=only(leaf.dims, manual if before else region),
        grad_dims=only(leaf.grad_dims, region),
        constraint=spec_of(only(leaf.dims, region), unconstrained) if before else None,
        gathered=() if before else gathered,
        scattered=cut if scatters else (),
        sliced=() if scatters else cut,
        automatic=said if any(said) else only(leaf.explicit, automatic),
    )


def gradient_spec(x: Any, layout: Layout, where: DataMesh) -> PartitionSpec:
    """Returns how the gradient of `x` lies on the Explicit axes: as its type will say."""
    if not layout.placed:
        own: PartitionSpec = jax.typeof(x).sharding.spec
        return own
    dims = [
        manual + (layout.automatic[i] if i < len(layout.automatic) else ())
        for i, manual in enumerate(layout.grad_dims)
    ]
    return spec_of([[a for a in d if a in where.explicit_axes] for d in dims])


def moved_gradients(
    arrays: Sequence[Any], layouts: Layouts, where: DataMesh, wanted: Sequence[bool]
) -> list[tuple[int, PartitionSpec]]:
    """Returns the leaves whose gradient has another type than a cotangent, with its spec.

    On Explicit axes a cotangent lies as its primal does; inside an outer `jax.shard_map` it has its
    local shape.
    """
    moved = []
    for i, (x, layout) in enumerate(zip(arrays, layouts.leaves, strict=True)):
        if not wanted[i]:
            continue
        spec = gradient_spec(x, layout, where)
        if where.manual:
            cut = layout.cut
            if cut != layout.gathered[::-1]:
                dims = [[a for j, a in cut if j == d] for d in range(x.ndim)]
                moved.append((i, spec_of(dims)))
        elif where.explicit_axes and _trimmed(spec) != _trimmed(jax.typeof(x).sharding.spec):
            moved.append((i, spec))
    return moved


def _trimmed(spec: PartitionSpec) -> list[tuple[str, ...]]:
    dims = list(dims_of(spec))
    while dims and not dims[-1]:
        dims.pop()
    return dims
