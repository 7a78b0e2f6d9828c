"""The loss of one microbatch, and its weight, as jaxprs; and what is checked of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum import _jaxpr, _loss_checks
from gradaccum._activity import differentiated_collectives
from gradaccum._arguments import changed, objects
from gradaccum._copies import misused_copies, operators_over
from gradaccum._layout import Layouts
from gradaccum._mesh import vary, varying_axes
from gradaccum._options import Call
from gradaccum._variance import varying_outputs


def trace_loss(
    call: Call, layouts: Layouts, axes: Sequence[str], sample: Sequence[Any]
) -> tuple[Any, Any, Any]:
    """Returns the loss of one microbatch as a jaxpr, aux's tree and its leaves' accumulation."""
    options = call.options
    found: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = call.form.rebuild(arrays)
        watched = objects((args, kwargs))
        before = [jax.tree.leaves(x) for x in watched]
        output = options.fun(*args, **kwargs)
        _loss_checks.check_unchanged(changed(watched, before))
        loss, aux = _loss_checks.split_output(output, options.has_aux)
        accumulator = jax.tree.unflatten(options.aux_tree, options.aux_leaves)
        leaves, tree = jax.tree.flatten(aux)
        found.extend([tree, _loss_checks.aux_types(accumulator, aux) if options.has_aux else []])
        return [vary(jnp.asarray(x), axes) for x in (loss, *leaves)]

    program = jax.make_jaxpr(flat)(*sample)
    data_axes = call.where.axis_names
    _check_model_axes(call, layouts, axes, program)
    _loss_checks.check_operators(operators_over(program, data_axes), data_axes)
    collectives = _jaxpr.collectives_over(program, data_axes)
    weighted = options.weight_fn is not None
    warning = _loss_checks.check_data_collectives(
        collectives, data_axes, options.microbatches, weighted
    )
    if warning:
        warnings.warn(warning, stacklevel=2)
    return program, *found


def trace_weight(call: Call, layouts: Layouts, axes: Sequence[str], sample: Sequence[Any]) -> Any:
    """Returns the weight of one microbatch as a jaxpr of the array leaves, or None."""
    options = call.options
    weight_fn = options.weight_fn
    if weight_fn is None:
        return None

    def flat(*arrays: Any) -> jax.Array:
        args, kwargs = call.form.batch_arguments(options.fun, arrays)
        weight = weight_fn(*args, **kwargs)
        _loss_checks.check_weight(weight)
        return vary(jax.lax.stop_gradient(jnp.asarray(weight)), axes)

    program = jax.make_jaxpr(flat)(*sample)
    found = _jaxpr.collectives_over(program, call.where.axis_names)
    _loss_checks.check_weight_collectives(found, call.where.axis_names)
    # Of devices that share a microbatch and disagree on its weight, one would skip it and leave
    # the others waiting.
    _loss_checks.check_weight_invariant(_varying_axes(layouts, program))
    return program


def _check_model_axes(call: Call, layouts: Layouts, typed: Sequence[str], program: Any) -> None:
    """Checks what the traced loss does with the model axes that are manual here."""
    data_axes = call.where.axis_names
    manual = jax.sharding.get_abstract_mesh().manual_axes
    model = tuple(a for a in manual if a not in data_axes)
    if not data_axes or not model:
        return
    if typed:
        types = frozenset().union(*map(varying_axes, program.out_avals))
        _loss_checks.check_invariant([a for a in layouts.manual if a in types])
        return
    _loss_checks.check_invariant(_varying_axes(layouts, program))
    if call.differentiated is None:
        return
    live = [True] + [False] * (len(program.out_avals) - 1)
    found = differentiated_collectives(program, call.differentiated, live, model)
    _loss_checks.check_raw_collectives(found, call.where.manual)
    for axis, splits in layouts.splits:
        misuses = misused_copies(program, call.differentiated, live, splits, axis)
        _loss_checks.check_copies(misuses, axis, call.where.manual)


def _varying_axes(layouts: Layouts, program: Any) -> list[str]:
    """Returns the manual model axes that some result of the program varies over."""
    return [a for a, splits in layouts.splits if any(varying_outputs(program, splits, a))]
