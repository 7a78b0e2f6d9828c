"""What one device does of a call, inside the manual region: its microbatches, and the one mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax.microbatching import AccumulationType

from gradaccum import (
    _checks,
    _comm,
    _contracts,
    _gradient_hooks,
    _loop,
    _normalise,
    _reduce,
    _trace,
)
from gradaccum._arguments import Role, is_key
from gradaccum._contribution import Loop
from gradaccum._layout import Layout, Layouts
from gradaccum._means import Awaited
from gradaccum._mesh import DataMesh, is_typed, vary, varying_axes
from gradaccum._microbatch import split
from gradaccum._options import Call


def _enter(
    call: Call, layouts: Layouts, typed: Sequence[str], replicated: bool, arrays: Sequence[Any]
) -> list[Any]:
    """Returns one device's leaves as the loop takes them: gathered whole, the batch split."""
    where, roles = call.where, call.form.roles
    leaves = [x if is_key(x) else vary(x, typed) for x in arrays]
    if replicated:
        leaves = [
            _reduce.from_replicated(x, layout.replicated(where.axis_names))
            if role is Role.BROADCAST and jnp.issubdtype(x.dtype, jnp.inexact)
            else x
            for role, layout, x in zip(roles, layouts.leaves, leaves, strict=True)
        ]
    leaves = [_reduce.gather(x, a) for x, a in zip(leaves, layouts.leaves, strict=True)]
    k = call.options.microbatches
    rows = [i for i, role in enumerate(roles) if role is Role.BATCH]
    size = leaves[rows[0]].shape[0]
    for i in rows:
        leaves[i] = split(leaves[i], k)
    _contracts.check_microbatches([leaves[i] for i in rows], k, size)
    return leaves


class OneDevice(NamedTuple):
    """One device's microbatches, accumulated and not reduced."""

    sums: _reduce.Sums
    own: _reduce.Rows
    aux_tree: Any
    aux_types: tuple[AccumulationType, ...]
    dtypes: list[Any]  # of the loss and of each aux leaf


def accumulate(
    call: Call, layouts: Layouts, arrays: Sequence[jax.Array], *, scale: float, replicated: bool
) -> OneDevice:
    """Runs this device's microbatches, its gradients times `scale`; inside the manual region."""
    options, where, roles = call.options, call.where, call.form.roles
    k = options.microbatches
    typed = where.axis_names if is_typed(where.axis_names) else ()
    leaves = _enter(call, layouts, typed, replicated, arrays)

    sample = [x[0] if role is Role.BATCH else x for role, x in zip(roles, leaves, strict=True)]
    program, tree, types = _trace.trace_loss(call, layouts, typed, sample)
    loop = Loop(
        loss=program,
        weight=_trace.trace_weight(call, layouts, typed, sample),
        aux_types=types,
        roles=roles,
        differentiated=call.differentiated or (False,) * len(arrays),
        dtypes=[None if is_key(x) else options.accumulator_of(x.dtype) for x in arrays],
        scale=scale,
        microbatches=k,
        fused=options.fused,
        overlap=options.overlap,
        unroll=options.unroll,
        hook=_gradient_hooks.chain_of(call, layouts, "hook", options.hooks),
    )
    device = jax.lax.axis_index(where.axis_names) if where.axis_names else 0
    sums, own = _loop.accumulate(loop, leaves, device * k, typed)
    sums = _gradient_hooks.after_accumulation(call, layouts, sums, scale)
    return OneDevice(sums, own, tree, tuple(types), [x.dtype for x in program.out_avals])


def means(call: Call, layouts: Layouts, found: list[Any], *arrays: jax.Array) -> dict[str, Any]:
    """Accumulates this device's microbatches and takes the one mean.

    Returns:
      "shared": loss and aux that are the same on all data devices; "rows": aux that is split over
      them like the batch; "grads": each leaf's, as it is laid out. `found` receives aux's tree.
    """
    options, where = call.options, call.where
    count = options.microbatches * where.size
    mean = options.loss_reduction == "mean" and options.weight_fn is None
    replicated = where.manual and not is_typed(where.axis_names) and not options.fused
    one = accumulate(call, layouts, arrays, scale=1 / count if mean else 1.0, replicated=replicated)
    found.append(one.aux_tree)
    sums, hooked = one.sums, [None] * len(arrays)
    if options.comm_hook is not None and any(call.differentiated or ()):
        hooked = _hooked_means(call, layouts, sums)
        sums = sums._replace(grads=[None] * len(arrays))
    total = _reduce.reduce_sum(
        sums, where, layouts, [options.reduce_dtype] * len(arrays), replicated=replicated
    )
    total, own = _normalise.normalise(
        total,
        one.own,
        aux_types=one.aux_types,
        loss_reduction=options.loss_reduction,
        count=count,
    )
    grads = [
        next((x for x in xs if x is not None), None)
        for xs in zip(total.grads, own.grads, hooked, strict=True)
    ]
    return {
        "shared": {
            "loss": total.loss.astype(one.dtypes[0]),
            "aux": [_cast_aux(x, d) for x, d in zip(total.aux, one.dtypes[1:], strict=True)],
        },
        "rows": own.aux,
        "grads": [
            _like(g, x, where, layout)
            for g, x, layout in zip(grads, arrays, layouts.leaves, strict=True)
        ],
    }


def _hooked_means(call: Call, layouts: Layouts, sums: _reduce.Sums) -> list[Any]:
    """Returns each array leaf's mean as the communication hook takes it; None without one."""
    options, where = call.options, call.where
    leaves = {i: g for i, g in enumerate(sums.grads) if g is not None}
    order, tree = jax.tree.flatten(
        _gradient_hooks.tree_of(call.form, options.fun, {i: i for i in leaves})
    )
    # Sums were scaled by 1 / (k n), those of a sum-reduced loss not at all.
    weight = jnp.float32(1 / where.size) if sums.weight is None else sums.weight
    awaited = [
        Awaited(
            dtype=leaves[i].dtype,
            reduce_dtype=options.reduce_dtype,
            layout=layouts.leaves[i],
            manual=layouts.manual,
            automatic=layouts.automatic,
        )
        for i in order
    ]
    means = _comm.mean_of_sums(
        _checks.API, options.comm_hook, tree, [leaves[i] for i in order], weight, awaited, where
    )
    found = dict(zip(order, means, strict=True))
    return [found.get(i) for i in range(len(sums.grads))]


def _like(g: Any, x: jax.Array, where: DataMesh, layout: Layout) -> Any:
    """Returns the gradient in the dtype of `x`, varying as it is to leave the region."""
    if g is None:
        return None
    axes = varying_axes(x)
    if not where.manual:  # our own region: over what splits it, and as `x` does in one outside
        axes = axes.intersection(where.manual_axes).union(*layout.grad_dims)
    return vary(g.astype(x.dtype), axes if is_typed(where.axis_names) else ())


def _cast_aux(x: Any, dtype: Any) -> Any:
    return x if x is None or not jnp.issubdtype(dtype, jnp.inexact) else x.astype(dtype)
