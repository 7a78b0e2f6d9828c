"""One call of a decorated loss: checked, traced, sharded over the data axes, differentiated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
    _loss_checks,
    _normalise,
    _reduce,
    _trace,
)
from gradaccum._arguments import (
    Role,
    is_key,
    positional_parameters,
)
from gradaccum._layout import Layout, Layouts, lay_out, moved_gradients
from gradaccum._means import Awaited
from gradaccum._mesh import UNSET, DataMesh, is_typed, vary, varying_axes
from gradaccum._microbatch import split
from gradaccum._options import Call
from gradaccum._shard import explicit_as_auto, shard_over_data


def _labelled(call: Call, arrays: Sequence[Any], keep: Callable[[int], bool]) -> dict[str, Any]:
    return {p: arrays[i] for i, p in enumerate(call.form.paths(call.options.fun)) if keep(i)}


def _check(call: Call, layouts: Layouts, arrays: Sequence[Any]) -> None:
    """Checks the arrays' global shapes and the call's form, before anything is computed."""
    options, form, where = call.options, call.form, call.where
    roles, owners = form.roles, form.owners()
    devices = 1 if where.manual else where.size
    batch = _labelled(call, arrays, lambda i: roles[i] is Role.BATCH)
    size = _checks.check_batch(batch, form.names, options.microbatches, devices)

    named = [] if options.keys is UNSET else [*options.keys.positions, *options.keys.keywords]
    holders = {owners[i] for i, role in enumerate(roles) if role is Role.KEY}
    keyless = [i for i in owners if form.is_key[i] and i not in holders]
    _checks.check_named_keys([form.names[i] for i in dict.fromkeys(keyless)])
    if options.keys is UNSET or named:
        shared = lambda i: roles[i] is Role.BROADCAST and is_key(arrays[i])  # noqa: E731
        _checks.check_shared_keys(_labelled(call, arrays, shared))

    if devices * options.microbatches == 1:
        return
    # Without a differentiated argument, the first is taken to be what elsewhere is (as jax.grad).
    first = (0, *positional_parameters(options.fun)[:1])
    exempt = {i for i, name in enumerate(form.names) if name in first}
    if call.differentiated is not None:
        exempt = {owners[i] for i, d in enumerate(call.differentiated) if d}

    def forgotten(i: int) -> bool:
        meant = owners[i] in exempt or layouts.leaves[i].placed
        whole = roles[i] is Role.BROADCAST and not meant
        return whole and arrays[i].ndim > 0 and arrays[i].shape[0] == size

    _checks.check_forgotten(_labelled(call, arrays, forgotten), size)


def _check_cotangents(call: Call, layouts: Layouts, arrays: Sequence[Any]) -> None:
    """Checks that the gradients can be cotangents, where they are to be."""
    if call.cotangents and call.differentiated is not None:
        moved = dict(moved_gradients(arrays, layouts, call.where, call.differentiated))
        leaves = _labelled(call, arrays, lambda i: i in moved)
        _loss_checks.check_cotangents(leaves, list(moved.values()), call.where.manual)


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
    loop = _loop.Loop(
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


def _local(call: Call, layouts: Layouts, found: list[Any], *arrays: jax.Array) -> dict[str, Any]:
    """Accumulates this device's microbatches and takes the one mean.

    Returns:
      "shared": loss and aux that are the same on all data devices; "rows": aux that is split over
      them like the batch; "grads": each leaf's, as it is laid out. `found` receives aux's tree.
    """
    options, where = call.options, call.where
    count = options.microbatches * where.size
    mean = options.loss_reduction == "mean" and options.weight_fn is None
    replicated = where.manual and not is_typed(where.axis_names) and not options.fused
    hooked = options.comm_hook is not None and any(call.differentiated or ())
    one = accumulate(call, layouts, arrays, scale=1 / count if mean else 1.0, replicated=replicated)
    found.append(one.aux_tree)
    sums, means = one.sums, [None] * len(arrays)
    if hooked:
        means = _hooked_means(call, layouts, sums)
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
        for xs in zip(total.grads, own.grads, means, strict=True)
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
    """Returns each array leaf's mean as the communication hook takes it; None without one.

    The hook is given this device's mean, of weight 1, or its sum with its weight.
    """
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


def prepare(call: Call, arrays: Sequence[Any]) -> tuple[Call, Layouts]:
    """Checks a call and lays its arrays out, before anything is computed."""
    options = call.options
    call = dataclasses.replace(call, where=explicit_as_auto(call.where, arrays))
    specs = (options.in_specs, options.grad_specs)
    layouts = lay_out(_checks.API, specs, call.form, options.fun, call.where, arrays)
    _check(call, layouts, arrays)
    _check_cotangents(call, layouts, arrays)
    return call, layouts


def _run(call: Call, arrays: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Returns loss, aux and each array leaf's gradient (None where not wanted)."""
    options = call.options
    call, layouts = prepare(call, arrays)
    found: list[Any] = []
    local, placed, given, wants = _gradient_hooks.with_values(_local, call, layouts, found, arrays)
    out = shard_over_data(
        local,
        call.where,
        placed,
        given,
        wants,
        # Inside a region whose values are typed, so are ours.
        check_vma=options.check_vma or is_typed(call.where.manual_axes),
        differentiable=not options.fused,
    )
    shared, grads = out["shared"], out["grads"][: len(arrays)]
    aux = [b if a is None else a for a, b in zip(shared["aux"], out["rows"], strict=True)]
    if not call.where.manual:
        some = [(g, x) for g, x in zip(grads, arrays, strict=True) if g is not None]
        _contracts.check_gradients([g for g, _ in some], [x for _, x in some])
    return shared["loss"], jax.tree.unflatten(found[0], aux), grads


_run_cached = jax.jit(_run, static_argnums=0)


def run(call: Call, arrays: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Runs under jit. Eager calls share one cache; a call on tracers leaves nothing in it."""
    out: tuple[Any, Any, list[Any]]
    if _gradient_hooks.is_traced(call, arrays):
        out = jax.jit(functools.partial(_run, call))(list(arrays))
    else:
        out = _run_cached(call, list(arrays))
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(call: Call, *arrays: Any) -> tuple[Any, Any]:
    loss, aux, _ = run(call, arrays)
    return loss, aux


def _fwd(call: Call, *primals: Any) -> tuple[Any, list[Any]]:
    wanted = tuple(
        bool(p.perturbed) and bool(jnp.issubdtype(p.value.dtype, jnp.inexact)) for p in primals
    )
    loss, aux, grads = run(
        dataclasses.replace(call, differentiated=wanted, cotangents=True),
        [p.value for p in primals],
    )
    return (loss, aux), grads


def _bwd(call: Call, grads: list[Any], cotangents: Any) -> tuple[Any, ...]:
    loss_ct, aux_ct = cotangents
    zero = jax.custom_derivatives.SymbolicZero
    for ct in jax.tree.leaves(aux_ct, is_leaf=lambda x: isinstance(x, zero)):
        if not isinstance(ct, zero) and ct.dtype != jax.dtypes.float0:
            _loss_checks.raise_aux_differentiated()
    if isinstance(loss_ct, zero):
        return (None,) * len(grads)
    loss_ct = jnp.asarray(loss_ct)  # `jax.vjp` passes on a Python float as it is

    def scale(g: jax.Array) -> Any:
        wide = jnp.promote_types(g.dtype, loss_ct.dtype)
        return (g.astype(wide) * loss_ct.astype(wide)).astype(g.dtype)

    return tuple(None if g is None else scale(g) for g in grads)


differentiable.defvjp(_fwd, _bwd, symbolic_zeros=True)
