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

from gradaccum._layout import Layout, Layouts, gradient_spec
from gradaccum._mesh import DataMesh
from gradaccum._specs import dims_of, spec_of, without
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
    differentiable: bool = False,
    reduced: bool = True,
) -> dict[str, Any]:
    """Runs `local` on each data device's part of the arrays; automatic axes stay as they are.

    Args:
      local: one device's arrays -> {"shared": what is the same on all devices, "rows": what is
        split over the data axes along axis 0, "grads": one an array,
        None where not wanted}.
      where: the data axes. With none, or manual ones, `local` is called as it is.
      layouts: how the arrays and their gradients lie.
      arrays: the global arrays.
      wanted: for each of them, whether it has a gradient.
      check_vma: as in `jax.shard_map`.
      differentiable: the result may itself be differentiated.
      reduced: the gradients lie as their layouts say; else there is one row a device of each,
        `[n, ...]`, split over the model axes alone.

    Returns:
      What `local` returns, with global arrays.
    """
    if not where.axis_names or where.manual:
        return local(*arrays)
    leaves = layouts.leaves
    data, shared = PartitionSpec(where.axis_names), PartitionSpec()
    if layouts.manual and differentiable and not check_vma:
        local = _with_boundaries(local, where, layouts)

    def each(spec: Callable[[Any, Layout], PartitionSpec]) -> list[PartitionSpec | None]:
        leaf = zip(arrays, leaves, wanted, strict=True)
        specs = [spec(x, layout) if w else None for x, layout, w in leaf]
        return specs if reduced else [s if s is None else row_spec(where, s) for s in specs]

    region = data_region(
        local,
        where,
        layouts.manual,
        in_specs=tuple(spec_of(x.dims) for x in leaves),
        out_specs={
            "shared": shared,
            "rows": data,
            "grads": each(lambda _, layout: spec_of(layout.grad_dims)),
        },
        out_types={
            "shared": shared,
            "rows": data,
            "grads": each(lambda x, layout: gradient_spec(x, layout, where)),
        },
        constraints=[leaf.constraint for leaf in leaves],
        check_vma=check_vma,
    )
    out: dict[str, Any] = region(*arrays)
    return out


def row_spec(where: DataMesh, spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec of one row a data device, of values that `spec` splits over other axes."""
    return spec_of([where.axis_names, *without(dims_of(spec), where.axis_names)])


def data_region(
    local: Callable[..., Any],
    where: DataMesh,
    manual: Sequence[str],
    *,
    in_specs: Any,
    out_specs: Any,
    out_types: Any,
    constraints: Sequence[PartitionSpec | None] = (),
    check_vma: bool = False,
) -> Callable[..., Any]:
    """Returns `jax.shard_map` of `local`, over the data axes and the model axes `manual`.

    Explicit axes are Auto inside; what comes out has types again.

    Args:
      local: what each device does.
      where: the mesh and its data axes, not manual.
      manual: the model axes that are to be manual.
      in_specs: as `jax.shard_map` takes them.
      out_specs: the same.
      out_types: the same of all axes: how the results lie on the Explicit ones.
      constraints: how each argument is laid out before it enters; none, or as many.
      check_vma: as `jax.shard_map` takes it.
    """
    region = jax.shard_map(
        local,
        mesh=None if where.explicit_axes else where.mesh,  # auto_axes sets its own context
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*where.axis_names, *manual},
        check_vma=check_vma,
    )

    def run(*arrays: Any) -> Any:
        if constraints:
            arrays = tuple(
                x if spec is None else jax.lax.with_sharding_constraint(x, _on(where, spec))
                for x, spec in zip(arrays, constraints, strict=True)
            )
        return region(*arrays)

    if not where.explicit_axes:
        return run

    def typed(spec: PartitionSpec) -> Any:
        dims = [[a for a in d if a in where.explicit_axes] for d in dims_of(spec)]
        return _on(where, spec_of(dims))

    auto: Callable[..., Any] = jax.sharding.auto_axes(
        run,
        axes=where.explicit_axes,
        out_sharding=jax.tree.map(typed, out_types, is_leaf=lambda x: isinstance(x, PartitionSpec)),
    )
    return auto


def _on(where: DataMesh, spec: PartitionSpec) -> Any:
    return spec if where.mesh is None else NamedSharding(where.mesh, spec)


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
