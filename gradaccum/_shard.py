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

from gradaccum._layout import Layouts, gradient_spec
from gradaccum._mesh import DataMesh
from gradaccum._specs import spec_of
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

    def over_data(*arrays: jax.Array) -> Any:
        laid_out = [
            x if leaf.constraint is None
            else jax.lax.with_sharding_constraint(x, _on(where, leaf.constraint))
            for x, leaf in zip(arrays, leaves, strict=True)
        ]  # fmt: skip
        return region(*laid_out)

    run = (
        _typed_outside(over_data, where, layouts, arrays, wanted)
        if where.explicit_axes
        else over_data
    )
    out: dict[str, Any] = run(*arrays)
    return out


def _on(where: DataMesh, spec: PartitionSpec) -> Any:
    return spec if where.mesh is None else NamedSharding(where.mesh, spec)


def _typed_outside(
    over_data: Callable[..., Any],
    where: DataMesh,
    layouts: Layouts,
    arrays: Sequence[jax.Array],
    wanted: Sequence[bool],
) -> Callable[..., Any]:
    """Makes Explicit axes Auto inside the function; what comes out has a type again."""

    out_sharding = {
        "shared": _on(where, PartitionSpec()),
        "rows": _on(where, PartitionSpec(where.axis_names)),
        "grads": [
            _on(where, gradient_spec(x, layout, where)) if w else None
            for x, layout, w in zip(arrays, layouts.leaves, wanted, strict=True)
        ],
    }
    auto: Callable[..., Any] = jax.sharding.auto_axes(
        over_data, axes=where.explicit_axes, out_sharding=out_sharding
    )
    return auto


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
