"""One call of a decorated loss: checked, traced, sharded over the data axes, differentiated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum import (
    _checks,
    _contracts,
    _device,
    _gradient_hooks,
    _loss_checks,
)
from gradaccum._arguments import (
    Role,
    is_key,
    positional_parameters,
)
from gradaccum._layout import Layouts, lay_out, moved_gradients
from gradaccum._mesh import UNSET, is_typed, varying_axes
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

        def own(i: int) -> bool:
            """Whether each data device has a value of its own, of which there is no shard."""
            wanted = call.differentiated is not None and call.differentiated[i]
            whole = call.form.roles[i] is Role.BROADCAST and not layouts.leaves[i].gathered
            return wanted and whole and bool(varying_axes(arrays[i]) & {*call.where.axis_names})

        moved = dict(moved_gradients(arrays, layouts, call.where, call.differentiated))
        leaves = _labelled(call, arrays, lambda i: i in moved)
        _loss_checks.check_cotangents(leaves, list(moved.values()), call.where.manual)
        _loss_checks.check_shared(_labelled(call, arrays, own), call.where.axis_names)


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
    local, placed, given, wants = _gradient_hooks.with_values(
        _device.means, call, layouts, found, arrays
    )
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
