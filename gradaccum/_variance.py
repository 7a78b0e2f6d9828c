"""What differs over a manual axis that JAX has no types for, and what enters it without an f.

A value is *varying* if the axis' devices may hold different ones. A value is *shared* if it is
active, the same on all devices, and so is its cotangent to be: a replicated parameter, a sum by
`reduce_from`, and what is computed from them. `copy_to` (Megatron's f) ends that: each device has a
cotangent of its own, which the rule of f sums. Where a shared value meets a varying one without an
f, each device ends up with a part of the cotangent: an *entry*. So does one that a g sums.

The walk is that of _activity: forward reachability, here of pairs (tag, variable).
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util

from gradaccum import _activity
from gradaccum._activity import OWN_RULE, TRANSPARENT, Body, Flow, Pairs, has_tangent
from gradaccum._jaxpr import (
    axes_of,
    collectives_over,
    equations,
    is_variable,
    open_jaxpr,
    sub_jaxprs,
)

# The tags, and a node of the walk that is always reached.
_VARYING, _ACTIVE, _SHARED = "varying", "active", "shared"
_ALWAYS = ("always", None)

# Their results are the same on all devices of the axis. They themselves (without a rule of the
# user's) transpose to sums of the devices' cotangents, as an f does.
_BARRIERS = (
    *("psum", "psum_invariant", "pmax", "pmin", "pbroadcast"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced"),
)


class Entry(NamedTuple):
    """An equation where a shared value enters computation that varies."""

    primitive: str
    source: str  # "file:line:column (function)", or "unknown"


def varying_outputs(jaxpr: Any, varying: Sequence[bool], axis: str) -> list[bool]:
    """Returns for each output whether it may differ between the devices of an axis.

    Args:
      jaxpr: a function, traced where the axis is manual.
      varying: for each input, whether it differs.
      axis: the axis.
    """
    jaxpr = open_jaxpr(jaxpr)
    start = {_ALWAYS, *_tagged(_VARYING, jaxpr.invars, varying)}
    reached = _activity.reach(jaxpr, start, True, _flow(axis, tangents=False))
    return [is_variable(v) and (_VARYING, v) in reached for v in jaxpr.outvars]


def missing_copies(
    jaxpr: Any, active: Sequence[bool], live: Sequence[bool], varying: Sequence[bool], axis: str
) -> list[Entry]:
    """Returns where shared values enter computation that varies over an axis, in program order.

    To be called where the axis is manual: the rules of `custom_vjp` functions are traced, as an f
    shows only in its backward rule, which communicates.

    Args:
      jaxpr: the function, traced in the same place, before differentiation.
      active: for each input, whether it is differentiated.
      live: for each output, whether it is (the loss is, aux is not).
      varying: for each input, whether it differs between the axis' devices.
      axis: the axis.
    """
    jaxpr, flow = open_jaxpr(jaxpr), _flow(axis, tangents=True)
    on = [a and has_tangent(v) for v, a in zip(jaxpr.invars, active, strict=True)]
    start = {_ALWAYS, *_tagged(_VARYING, jaxpr.invars, varying)}
    start |= _tagged(_ACTIVE, jaxpr.invars, on) | _tagged(_SHARED, jaxpr.invars, on)
    outputs = {v for v, a in zip(jaxpr.outvars, live, strict=True) if a and is_variable(v)}
    outputs = {v for v in outputs if has_tangent(v)}
    reached = _activity.reach(jaxpr, start, True, flow)
    needed = _activity.reach(jaxpr, outputs, False)
    return list(_entries(jaxpr, reached, needed, flow, axis, "unknown"))


def _entries(
    jaxpr: Any, reached: set[Any], live: set[Any], flow: Flow, axis: str, call: str
) -> Iterator[Entry]:
    for eqn in jaxpr.eqns:
        row = Entry(eqn.primitive.name, _source(eqn, call))
        if eqn.primitive.name in OWN_RULE:
            # A g sums m equal values, and its rule passes the cotangent on once. A rule that does
            # not communicate leaves a part of the cotangent, as arithmetic does.
            pairs = [(a[1], b[1]) for a, b in flow.edges(eqn) if a[0] == b[0] == _SHARED]
            sums = _is_sum(eqn, axis)
            if any(
                _shared(a, reached) and (b in live if sums else _varying(b, reached, live))
                for a, b in pairs
            ):
                yield row
            continue
        bodies = _activity.differentiable_bodies(eqn) if _looked_into(eqn) else []
        if not bodies and not _activity.refs_among(eqn.invars):
            pairs = _activity.edges(eqn)
            if any(_shared(a, reached) and _varying(b, reached, live) for a, b in pairs):
                yield row
        # A while loop's flow has its condition as one more.
        for body, lifted in zip(bodies, flow.bodies(eqn), strict=False):
            found = _activity.inside(lifted, reached, True, flow)
            needed = _activity.inside(body, live, False)
            if (
                any(_shared(a, reached) and _varying(b, found, needed) for a, b in body.enter)
                or any(_shared(a, found) and _varying(b, found, needed) for a, b in body.back)
                or any(_shared(a, found) and _varying(b, reached, live) for a, b in body.leave)
            ):
                yield row
            yield from _entries(body.jaxpr, found, needed, flow, axis, row.source)


def _source(eqn: Any, call: str) -> str:
    """Returns the user's line: inside a function of jax.numpy there is none but that of its call.

    In reduce_from it is the caller's.
    """
    frames = source_info_util.summarize(eqn.source_info, num_frames=4).split("\n")
    frames = [x for x in frames if not x.startswith(os.path.dirname(__file__))]
    return frames[-1] if frames and frames[-1] not in ("", "unknown") else call


def _shared(v: Any, reached: set[Any]) -> bool:
    return (_SHARED, v) in reached and (_VARYING, v) not in reached


def _varying(v: Any, reached: set[Any], live: set[Any]) -> bool:
    return v in live and (_VARYING, v) in reached


def _flow(axis: str, tangents: bool) -> Flow:
    """Returns how the tags flow: that of varying values, and with `tangents` the others."""
    known: dict[Any, Pairs] = {}

    def transposed_alone(eqn: Any) -> Pairs:
        key = tuple(eqn.outvars)
        if key not in known:
            known[key] = _transposed_alone(eqn, axis)
        return known[key]

    def edges(eqn: Any) -> Pairs:
        pairs = [] if _looked_into(eqn) else _spread(eqn, axis)
        if eqn.primitive.name == "cond":  # devices take different branches
            pairs = _lift(_VARYING, itertools.product(eqn.invars[:1], eqn.outvars))
        if not tangents or eqn.primitive.name in TRANSPARENT:
            return pairs
        through = _activity.edges(eqn)
        pairs += _lift(_ACTIVE, through)
        summed = _communicates(eqn, axis)
        if eqn.primitive.name in OWN_RULE:
            through = transposed_alone(eqn)
            if summed:
                pairs += [((_ACTIVE, a), (_SHARED, b)) for a, b in through]
        if not summed or eqn.primitive.name in OWN_RULE:
            pairs += _lift(_SHARED, through)
        return pairs

    def bodies(eqn: Any) -> list[Body]:
        if not _looked_into(eqn):
            return []
        name = eqn.primitive.name
        inwards = (_ACTIVE, _SHARED) if tangents and name not in OWN_RULE else ()
        outwards = inwards if name in TRANSPARENT else ()
        found = [_lifted(body, inwards, outwards) for body in _activity.bodies(eqn)]
        return found + ([_condition(eqn)] if name == "while" else [])

    return Flow(edges, bodies)


def _lifted(body: Body, inwards: Sequence[str], outwards: Sequence[str]) -> Body:
    """Returns a body's flow of tags: varying values of any type, the others differentiably."""

    def lift(pairs: Pairs, tags: Sequence[str]) -> Pairs:
        through = _activity.differentiable(pairs)
        return _lift(_VARYING, pairs) + [p for tag in tags for p in _lift(tag, through)]

    enter = [(_ALWAYS, _ALWAYS), *lift(body.enter, inwards)]
    return Body(body.jaxpr, enter, lift(body.leave, outwards), lift(body.back, inwards))


def _condition(eqn: Any) -> Body:
    """Returns the flow through a loop's condition: devices may leave it at different times."""
    inner = open_jaxpr(eqn.params["cond_jaxpr"])
    # The results stand for what is carried, which the loop's body has reached before.
    inputs = [*eqn.invars[: eqn.params["cond_nconsts"]], *eqn.outvars]
    enter = [(_ALWAYS, _ALWAYS), *_lift(_VARYING, zip(inputs, inner.invars, strict=True))]
    leave = _lift(_VARYING, itertools.product(inner.outvars, eqn.outvars))
    return Body(inner, enter, leave, [])


def _spread(eqn: Any, axis: str) -> Pairs:
    """Returns the flow of varying values through an equation that is not looked into."""
    inner = itertools.chain.from_iterable(map(equations, sub_jaxprs(eqn)))
    # Nothing is claimed of a kernel or a solver that uses the axis in its own way.
    if _is_barrier(eqn, axis) or any(axis in axes_of(e) for e in inner):
        return []
    if eqn.primitive.name in _activity.PAIRWISE:
        return _lift(_VARYING, zip(eqn.invars, eqn.outvars, strict=True))
    written = [*eqn.outvars, *_activity.refs_among(eqn.invars)]
    pairs = _lift(_VARYING, itertools.product(eqn.invars, written))
    if axis in axes_of(eqn):  # axis_index, all_to_all
        pairs += [(_ALWAYS, (_VARYING, v)) for v in written]
    return pairs


def _is_barrier(eqn: Any, axis: str) -> bool:
    return (
        eqn.primitive.name in _BARRIERS
        and axis in axes_of(eqn)
        and eqn.params.get("axis_index_groups") is None
    )


def _is_sum(eqn: Any, axis: str) -> bool:
    """True if a call is of a psum over the axis alone."""
    inside = [e for inner in sub_jaxprs(eqn) for e in inner.eqns]
    return [e.primitive.name for e in inside] == ["psum"] and axis in axes_of(inside[0])


def _communicates(eqn: Any, axis: str) -> bool:
    """True if an equation, or one inside it, communicates over the axis."""
    named = axis in axes_of(eqn) and eqn.primitive.name != "axis_index"
    return named or any(collectives_over(inner, (axis,)) for inner in sub_jaxprs(eqn))


def _looked_into(eqn: Any) -> bool:
    """True if the jaxprs inside an equation are functions of its operands, one to one."""
    if eqn.primitive.name in TRANSPARENT:
        return True
    inner = sub_jaxprs(eqn)
    shape = len(eqn.invars), len(eqn.outvars)
    return bool(inner) and all((len(j.invars), len(j.outvars)) == shape for j in inner)


def _transposed_alone(eqn: Any, axis: str) -> Pairs:
    """Returns the pairs (operand, result) of a call with its own rule that need no other device.

    The operand's cotangent depends on the result's, and not through a collective over the axis: the
    rule of an f, or of more, has one.
    """
    results = [v for v in eqn.outvars if has_tangent(v)]
    backward = []

    def trace(*args: Any) -> Any:
        def call(*args: Any) -> Any:
            outputs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
            return [x for v, x in zip(eqn.outvars, outputs, strict=True) if has_tangent(v)]

        outputs, transpose = jax.vjp(call, *args)
        backward.append(open_jaxpr(jax.make_jaxpr(transpose)(outputs)))
        return outputs

    try:
        jax.make_jaxpr(trace)(*(v.aval if is_variable(v) else v.val for v in eqn.invars))
    except Exception:  # Any that a rule raises; nothing is claimed of it.
        return []
    (rule,) = backward
    summed = {v for e in rule.eqns if _communicates(e, axis) for v in e.outvars}
    with_others = _activity.reach(rule, summed, True)
    pairs = []
    for result, cotangent in zip(results, rule.invars, strict=True):
        alone = _activity.reach(rule, {cotangent}, True) - with_others
        ends = zip(eqn.invars, rule.outvars, strict=True)
        pairs += [(v, result) for v, end in ends if is_variable(end) and end in alone]
    return _activity.differentiable(pairs)


def _tagged(tag: str, variables: Sequence[Any], on: Sequence[bool]) -> set[Any]:
    return {(tag, v) for v, yes in zip(variables, on, strict=True) if yes}


def _lift(tag: str, pairs: Any) -> Pairs:
    return [((tag, a), (tag, b)) for a, b in pairs if is_variable(a) and is_variable(b)]
