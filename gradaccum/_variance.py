"""What differs between the devices of a manual axis that JAX has no types for.

The walk is that of _activity: forward reachability, here of pairs (tag, variable). A value is
*varying* if the axis' devices may hold different ones; _copies has more tags.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from gradaccum import _activity
from gradaccum._activity import TRANSPARENT, Body, Flow, Pairs
from gradaccum._jaxpr import axes_of, equations, is_variable, open_jaxpr, sub_jaxprs

# A tag, and a node of the walk that is always reached.
VARYING = "varying"
ALWAYS = ("always", None)

# Their results are the same on all devices of the axis. They themselves (without a rule of the
# user's) transpose to sums of the devices' cotangents, as an f does.
_BARRIERS = (
    *("psum", "psum_invariant", "pmax", "pmin", "pbroadcast"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced"),
)


def varying_outputs(jaxpr: Any, varying: Sequence[bool], axis: str) -> list[bool]:
    """Returns for each output whether it may differ between the devices of an axis.

    Args:
      jaxpr: a function, traced where the axis is manual.
      varying: for each input, whether it differs.
      axis: the axis.
    """
    jaxpr = open_jaxpr(jaxpr)
    reached = varying_in(jaxpr, varying, axis)
    return [is_variable(v) and (VARYING, v) in reached for v in jaxpr.outvars]


def varying_in(jaxpr: Any, varying: Sequence[bool], axis: str, constants: bool = False) -> set[Any]:
    """Returns (VARYING, v) for each variable of an open jaxpr that may differ, and others."""
    start = {ALWAYS, *tagged(VARYING, jaxpr.invars, varying)}
    if constants:
        start |= {(VARYING, v) for v in jaxpr.constvars}
    flow = Flow(
        edges=lambda eqn: spread(eqn, axis),
        bodies=lambda eqn: bodies(eqn, (), ()),
    )
    return _activity.reach(jaxpr, start, True, flow)


def bodies(eqn: Any, inwards: Sequence[str], outwards: Sequence[str]) -> list[Body]:
    """Returns the flow of tags through the jaxprs inside an equation that are looked into.

    Varying values flow whatever their type, the tags `inwards` and `outwards` differentiably.
    """
    if not looked_into(eqn):
        return []
    found = [_lifted(body, inwards, outwards) for body in _activity.bodies(eqn)]
    return found + ([_condition(eqn)] if eqn.primitive.name == "while" else [])


def _lifted(body: Body, inwards: Sequence[str], outwards: Sequence[str]) -> Body:
    def flow(pairs: Pairs, tags: Sequence[str]) -> Pairs:
        through = _activity.differentiable(pairs)
        return lift(VARYING, pairs) + [p for tag in tags for p in lift(tag, through)]

    enter = [(ALWAYS, ALWAYS), *flow(body.enter, inwards)]
    return Body(body.jaxpr, enter, flow(body.leave, outwards), flow(body.back, inwards))


def _condition(eqn: Any) -> Body:
    """Returns the flow through a loop's condition: devices may leave it at different times."""
    inner = open_jaxpr(eqn.params["cond_jaxpr"])
    # The results stand for what is carried, which the loop's body has reached before.
    inputs = [*eqn.invars[: eqn.params["cond_nconsts"]], *eqn.outvars]
    enter = [(ALWAYS, ALWAYS), *lift(VARYING, zip(inputs, inner.invars, strict=True))]
    leave = lift(VARYING, itertools.product(inner.outvars, eqn.outvars))
    return Body(inner, enter, leave, [])


def spread(eqn: Any, axis: str) -> Pairs:
    """Returns the flow of varying values through an equation, but through what is inside it."""
    if eqn.primitive.name == "cond":  # devices take different branches
        return lift(VARYING, itertools.product(eqn.invars[:1], eqn.outvars))
    if looked_into(eqn):
        return []
    inner = itertools.chain.from_iterable(map(equations, sub_jaxprs(eqn)))
    # Nothing is claimed of a kernel or a solver that uses the axis in its own way.
    if _is_barrier(eqn, axis) or any(axis in axes_of(e) for e in inner):
        return []
    if eqn.primitive.name in _activity.PAIRWISE:
        return lift(VARYING, zip(eqn.invars, eqn.outvars, strict=True))
    written = [*eqn.outvars, *_activity.refs_among(eqn.invars)]
    pairs = lift(VARYING, itertools.product(eqn.invars, written))
    if axis in axes_of(eqn):  # axis_index, all_to_all
        pairs += [(ALWAYS, (VARYING, v)) for v in written]
    return pairs


def _is_barrier(eqn: Any, axis: str) -> bool:
    return (
        eqn.primitive.name in _BARRIERS
        and axis in axes_of(eqn)
        and eqn.params.get("axis_index_groups") is None
    )


def looked_into(eqn: Any) -> bool:
    """True if the jaxprs inside an equation are functions of its operands, one to one."""
    if eqn.primitive.name in TRANSPARENT:
        return True
    inner = sub_jaxprs(eqn)
    shape = len(eqn.invars), len(eqn.outvars)
    return bool(inner) and all((len(j.invars), len(j.outvars)) == shape for j in inner)


def tagged(tag: str, variables: Sequence[Any], on: Sequence[bool]) -> set[Any]:
    """Returns the pairs (tag, variable) of those that are on."""
    return {(tag, v) for v, yes in zip(variables, on, strict=True) if yes}


def lift(tag: str, pairs: Any) -> Pairs:
    """Returns the flow of one tag along pairs of variables."""
    return [((tag, a), (tag, b)) for a, b in pairs if is_variable(a) and is_variable(b)]
