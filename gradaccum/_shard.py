"""The manual region: one `jax.shard_map` around what each data device does of a call."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradaccum._layout import Layout, Layouts
from gradaccum._mesh import DataMesh
from gradaccum._specs import dims_of, spec_of
from gradaccum._transpose import transposes


def explicit_as_auto(where: DataMesh, arrays: Sequence[jax.Array]) -> DataMesh:
    """Takes Explicit axes of a mesh given by argument as Auto, if no array's type has them.

    So arrays may come from the host or from an earlier call with `mesh=` alone: results typed on a
    mesh that is in no context could not be used.
    """
    typed = any(jax.typeof(x).sharding.mesh.explicit_axes for x in arrays)
    if typed or not where.explicit_axes or not isinstance(where.mesh, Mesh):
        return where
    mesh = Mesh(where.mesh.devices, where.mesh.axis_names)
    return dataclasses.replace(where, mesh=mesh, explicit_axes=())


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
            cut = layout.scattered + layout.sliced
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


def _same(x: Any, factor: float) -> Any:
    del factor
    return x


def _scaled(x: Any, factor: float) -> Any:
    return x * jnp.asarray(factor, x.dtype)


# In an untyped region JAX divides the cotangent of an output that is the same on all m devices of
# an axis by m, and sums that of such an input: right for a sum over the axis, wrong for operators
# whose own rules pass full cotangents on (Megatron's f and g). This restores it. It matters for
# second derivatives only.
_at_boundary, _ = transposes(_same, _scaled)


def shard_over_data(
    local: Callable[..., dict[str, Any]],
    where: DataMesh,
    layouts: Layouts,
    arrays: Sequence[jax.Array],
    wanted: Sequence[bool],
    *,
    check_vma: bool,
    differentiable: bool,
) -> dict[str, Any]:
    """Runs `local` on each data device's part of the arrays; automatic axes stay as they are.

    Args:
      local: one device's arrays -> {"shared": what is the same on all devices, "rows": what is
        split over the data axes along axis 0, "grads": one an array, None where not wanted}.
      where: the data axes. With none, or manual ones, `local` is called as it is.
      layouts: how the arrays and their gradients lie.
      arrays: the global arrays.
      wanted: for each of them, whether it has a gradient.
      check_vma: as in `jax.shard_map`.
      differentiable: the result may itself be differentiated.

    Returns:
      What `local` returns, with global arrays.
    """
    if not where.axis_names or where.manual:
        return local(*arrays)
    leaves = layouts.leaves
    data, shared = PartitionSpec(where.axis_names), PartitionSpec()
    in_specs = tuple(spec_of(x.dims) for x in leaves)
    out_specs = {
        "shared": shared,
        "rows": data,
        "grads": [spec_of(x.grad_dims) if w else None for x, w in zip(leaves, wanted, strict=True)],
    }
    if layouts.manual and differentiable and not check_vma:
        local = _with_boundaries(local, where, layouts)
    region = jax.shard_map(
        local,
        mesh=None if where.explicit_axes else where.mesh,  # auto_axes sets its own context
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*where.axis_names, *layouts.manual},
        check_vma=check_vma,
    )

    def of(spec: PartitionSpec) -> Any:
        return spec if where.mesh is None else NamedSharding(where.mesh, spec)

    def over_data(*arrays: jax.Array) -> Any:
        laid_out = [
            x if leaf.constraint is None
            else jax.lax.with_sharding_constraint(x, of(leaf.constraint))
            for x, leaf in zip(arrays, leaves, strict=True)
        ]  # fmt: skip
        return region(*laid_out)

    if not where.explicit_axes:
        out: dict[str, Any] = over_data(*arrays)
        return out
    # Explicit axes are Auto inside; what comes out has a type again.
    out_sharding = {
        "shared": of(shared),
        "rows": of(data),
        "grads": [
            of(gradient_spec(x, layout, where)) if w else None
            for x, layout, w in zip(arrays, leaves, wanted, strict=True)
        ],
    }
    auto = jax.sharding.auto_axes(over_data, axes=where.explicit_axes, out_sharding=out_sharding)
    out = auto(*arrays)
    return out


def _with_boundaries(
    local: Callable[..., dict[str, Any]], where: DataMesh, layouts: Layouts
) -> Callable[..., dict[str, Any]]:
    sizes = dict(where.sizes)

    def devices(dims: Sequence[Sequence[str]]) -> float:
        """The devices of the manual model axes that these dimensions are not split over."""
        named = {a for d in dims for a in d}
        return math.prod(sizes[a] for a in layouts.manual if a not in named)

    def pass_on(x: Any, factor: float) -> Any:
        inexact = x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
        return _at_boundary(x, factor) if inexact else x

    def bounded(*arrays: jax.Array) -> dict[str, Any]:
        inputs = [
            pass_on(x, 1 / devices(a.dims)) for x, a in zip(arrays, layouts.leaves, strict=True)
        ]
        out = local(*inputs)
        whole = functools.partial(pass_on, factor=devices(()))
        grads = [
            pass_on(g, devices(a.grad_dims))
            for g, a in zip(out["grads"], layouts.leaves, strict=True)
        ]
        return {
            "shared": jax.tree.map(whole, out["shared"]),
            "rows": jax.tree.map(whole, out["rows"]),
            "grads": grads,
        }

    return bounded
