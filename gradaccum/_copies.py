"""Where a loss lacks Megatron's f, or has one too many, on a manual axis that JAX has no types for.

Of the active values that are the same on all devices, a *shared* one's cotangent is to be the same
too: a replicated parameter's, a sum's by `reduce_from`, and of what is computed from them. An f
(`copy_to`) makes a *copied* one of it, of whose cotangent each device has a part; the f's rule sums
them. So a shared value must not meet varying ones, or each device ends up with a part of its
cotangent, and a copied one must not reach the loss but through them, or the whole is summed.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util

from gradaccum import _activity
from gradaccum._activity import OWN_RULE, TRANSPARENT, Flow, Pairs, has_tangent
from gradaccum._jaxpr import (
    axes_of,
    collectives_over,
    equations,
    is_variable,
    open_jaxpr,
    sub_jaxprs,
)
from gradaccum._variance import (
    ALWAYS,
    VARYING,
    bodies,
    lift,
    looked_into,
    spread,
    tagged,
    varying_in,
)

_ACTIVE, _SHARED, _COPIED = "active", "shared", "copied"
# What sums the devices' cotangents, as the rule of an f does.
_SUMS = ("psum", "psum_invariant", "reduce_scatter")
# The name scope of the operators of gradaccum.tensor_parallel.
_OPERATORS = "gradaccum/tensor_parallel"


class Entry(NamedTuple):
    """An equation at which a value has no f, or one too many."""

    primitive: str
    source: str  # "file:line:column (function)", or "unknown"


class Misuses(NamedTuple):
    """What a loss does wrong, each in program order.

    Attributes:
      missing: where a shared value enters computation that varies.
      extra: where a copied one is used like a shared one: beside one, by an f, or as the loss.
      foreign: where an f takes a value that varies.
    """

    missing: list[Entry]
    extra: list[Entry]
    foreign: list[Entry]


def misused_copies(
    jaxpr: Any, active: Sequence[bool], live: Sequence[bool], varying: Sequence[bool], axis: str
) -> Misuses:
    """Returns where shared values enter computation that varies over an axis, and the other way.

    To be called where the axis is manual: rules of `custom_vjp` functions are traced, as an f, the
    user's own too, shows only in its backward rule.

    Args:
      jaxpr: the function, traced in the same place, before differentiation.
      active: for each input, whether it is differentiated.
      live: for each output, whether it is (the loss is, aux is not).
      varying: for each input, whether it differs between the axis' devices.
      axis: the axis.
    """
    jaxpr, walk = open_jaxpr(jaxpr), _Walk(axis)
    on = [a and has_tangent(v) for v, a in zip(jaxpr.invars, active, strict=True)]
    start = {ALWAYS, *tagged(VARYING, jaxpr.invars, varying)}
    start |= tagged(_ACTIVE, jaxpr.invars, on) | tagged(_SHARED, jaxpr.invars, on)
    outputs = {v for v, a in zip(jaxpr.outvars, live, strict=True) if a and is_variable(v)}
    outputs = {v for v in outputs if has_tangent(v)}
    reached = _activity.reach(jaxpr, start, True, walk.flow)
    needed = _activity.reach(jaxpr, outputs, False)
    found = Misuses([], [], [])
    for kind, entry in walk.misuses(jaxpr, reached, needed, "unknown"):
        getattr(found, kind).append(entry)
    if not found.extra and any(_copied(v, reached) for v in outputs):
        found.extra.append(Entry("the loss itself", "its end"))
    return found


def operators_over(jaxpr: Any, axis_names: tuple[str, ...]) -> list[str]:
    """Returns the sources of tensor-parallel operators that communicate over one of the axes."""
    return [
        _source(eqn, "unknown")
        for eqn in equations(jaxpr)
        if _OPERATORS in str(eqn.source_info.name_stack)
        and any(_communicates(eqn, axis) for axis in axis_names)
    ]


class _Rule(NamedTuple):
    """How a call with a rule of its own hands cotangents on, as pairs (operand, result)."""

    alone: Pairs  # the operand's cotangent depends on the result's, and on no other device's
    copies: Pairs  # it is a sum over the devices of what is the same on all if the result's is
    whole: list[Any]  # the operands whose cotangent comes from others, and is the same on all
    parts: list[Any]  # those of whose cotangent each device gets its part (of one that is whole)


class _Walk:
    """The walk over one axis; each rule is traced once."""

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self.flow = Flow(self._edges, self._bodies)
        self._rules: dict[Any, _Rule] = {}

    def _rule(self, eqn: Any) -> _Rule:
        key = tuple(eqn.outvars)
        if key not in self._rules:
            self._rules[key] = _rule_of(eqn, self.axis)
        return self._rules[key]

    def _edges(self, eqn: Any) -> Pairs:
        pairs, name = spread(eqn, self.axis), eqn.primitive.name
        if name in TRANSPARENT:
            return pairs
        through, summed = _activity.edges(eqn), _communicates(eqn, self.axis)
        pairs += lift(_ACTIVE, through)
        if name in OWN_RULE:
            rule = self._rule(eqn)
            pairs += lift(_SHARED, rule.alone)
            pairs += [((_ACTIVE, a), (_COPIED, b)) for a, b in rule.copies]
            if summed:
                pairs += [((_ACTIVE, a), (_SHARED, b)) for a, b in rule.alone]
            else:
                pairs += lift(_COPIED, rule.alone)
        elif not summed:
            pairs += lift(_SHARED, through) + lift(_COPIED, through)
        return pairs

    def _bodies(self, eqn: Any) -> list[_activity.Body]:
        name, tags = eqn.primitive.name, (_ACTIVE, _SHARED, _COPIED)
        return bodies(eqn, () if name in OWN_RULE else tags, tags if name in TRANSPARENT else ())

    def misuses(
        self, jaxpr: Any, reached: set[Any], live: set[Any], call: str
    ) -> Iterator[tuple[str, Entry]]:
        for eqn in jaxpr.eqns:
            row = Entry(eqn.primitive.name, _source(eqn, call))
            own = eqn.primitive.name in OWN_RULE
            inside = _activity.differentiable_bodies(eqn) if looked_into(eqn) else []
            if own:
                yield from self._of_rule(eqn, reached, live, row)
            if not inside and not _activity.refs_among(eqn.invars):
                pairs = self._rule(eqn).alone if own else _activity.edges(eqn)
                if not own and any(
                    _shared(a, reached) and _varying(b, reached, live) for a, b in pairs
                ):
                    yield "missing", row
                if _meet(pairs, reached, live):
                    yield "extra", row
            # A while loop's flow has its condition as one more.
            for body, lifted in zip(inside, self.flow.bodies(eqn), strict=False):
                found = _activity.inside(lifted, reached, True, self.flow)
                needed = _activity.inside(body, live, False)
                if (
                    any(_shared(a, reached) and _varying(b, found, needed) for a, b in body.enter)
                    or any(_shared(a, found) and _varying(b, found, needed) for a, b in body.back)
                    or any(_shared(a, found) and _varying(b, reached, live) for a, b in body.leave)
                ):
                    yield "missing", row
                yield from self.misuses(body.jaxpr, found, needed, row.source)

    def _of_rule(
        self, eqn: Any, reached: set[Any], live: set[Any], row: Entry
    ) -> Iterator[tuple[str, Entry]]:
        rule = self._rule(eqn)
        # A g sums m equal values, and its rule passes the cotangent on once. A rule that does
        # not communicate leaves a part of the cotangent, as arithmetic does.
        if any(_shared(a, reached) and _varying(b, reached, live) for a, b in rule.alone):
            yield "missing", row
        if not any(v in live for v in eqn.outvars):
            return
        taken = eqn.invars if _is_sum(eqn, self.axis) else rule.parts
        if any(_shared(v, reached) for v in taken if is_variable(v)):
            yield "missing", row
        if any(_copied(v, reached) for v in rule.whole):
            yield "extra", row
        if any((_ACTIVE, v) in reached and (VARYING, v) in reached for v in rule.whole):
            yield "foreign", row


def _meet(pairs: Pairs, reached: set[Any], live: set[Any]) -> bool:
    """True if shared and copied values make one that does not vary, for the first time."""
    results = {b for _, b in pairs if b in live and (VARYING, b) not in reached}

    def meets(b: Any) -> bool:
        tags = [(_shared(a, reached), _copied(a, reached)) for a, result in pairs if result is b]
        return (True, False) in tags and (False, True) in tags

    return any(map(meets, results))


def _shared(v: Any, reached: set[Any]) -> bool:
    return (_SHARED, v) in reached and (VARYING, v) not in reached


def _copied(v: Any, reached: set[Any]) -> bool:
    return (_COPIED, v) in reached and (VARYING, v) not in reached


def _varying(v: Any, reached: set[Any], live: set[Any]) -> bool:
    return v in live and (VARYING, v) in reached


def _source(eqn: Any, call: str) -> str:
    """Returns the user's line, not ours; inside a function of jax.numpy that of its call."""
    frames = source_info_util.summarize(eqn.source_info, num_frames=4).split("\n")
    frames = [x for x in frames if not x.startswith(os.path.dirname(__file__))]
    return frames[-1] if frames and frames[-1] not in ("", "unknown") else call


def _is_sum(eqn: Any, axis: str) -> bool:
    """True if a call is of a sum over the axis alone."""
    inside = [e for inner in sub_jaxprs(eqn) for e in inner.eqns]
    return len(inside) == 1 and inside[0].primitive.name in _SUMS and axis in axes_of(inside[0])


def _communicates(eqn: Any, axis: str, names: Sequence[str] = ()) -> bool:
    """True if an equation, or one inside it, communicates over the axis (by one of `names`)."""
    found = [x for inner in sub_jaxprs(eqn) for x in collectives_over(inner, (axis,))]
    if axis in axes_of(eqn) and eqn.primitive.name != "axis_index":
        found.append(eqn.primitive.name)
    return any(x in names for x in found) if names else bool(found)


def _rule_of(eqn: Any, axis: str) -> _Rule:
    """Returns what the rule of a call does, or nothing of one that raises."""
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
        return _Rule([], [], [], [])
    (rule,) = backward
    ends = [(v, end) for v, end in zip(eqn.invars, rule.outvars, strict=True) if is_variable(end)]

    def reached(start: Any) -> set[Any]:
        return _activity.reach(rule, set(start), True)

    def after(equations: Sequence[Any]) -> set[Any]:
        return reached(v for e in equations for v in e.outvars)

    def varies(cotangents: bool, kept: bool) -> set[Any]:  # kept by the forward pass
        return varying_in(rule, [cotangents] * len(rule.invars), axis, constants=kept)

    equal, unequal, parts = varies(False, True), varies(True, True), varies(False, False)
    summing = [e for e in rule.eqns if _communicates(e, axis)]
    with_others = after(summing)
    copying = [
        e
        for e in summing
        if _communicates(e, axis, _SUMS) and not any((VARYING, v) in equal for v in e.invars)
    ]
    alone, copies = [], []
    for result, cotangent in zip(results, rule.invars, strict=True):
        there = reached({cotangent})
        added = after([e for e in copying if there.intersection(filter(is_variable, e.invars))])
        alone += [(v, result) for v, end in ends if end in there - with_others]
        copies += [(v, result) for v, end in ends if end in added]
    forward = [eqn.params["callee"]] if eqn.primitive.name == "linear_call" else sub_jaxprs(eqn)
    whole = [v for v, end in ends if end in with_others and (VARYING, end) not in unequal]
    if any(collectives_over(inner, (axis,)) for inner in forward):
        whole = []
    return _Rule(
        alone=_activity.differentiable(alone),
        copies=_activity.differentiable(copies),
        whole=[v for v in whole if has_tangent(v)],
        parts=[v for v, end in ends if (VARYING, end) in parts and has_tangent(v)],
    )
