"""Which collectives of a loss function lie on a differentiated path: walks over its jaxpr.

A value is *active* if it depends differentiably on a differentiated input, and *live* if the loss
depends differentiably on it. Both are reachability along the same pairs (input, output) of each
equation: active walks them forward in program order, live walks them back in reverse order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.ref import AbstractRef

from gradaccum._jaxpr import open_jaxpr, sub_jaxprs

# With check_vma=False these transpose to the collective that is right only where every device
# holds its own cotangent: `psum` to a psum, `all_gather` to a psum_scatter. `pmean` is a psum.
_WRONG_TRANSPOSE = ("psum", "all_gather")
# Their derivative is zero.
_FLAT = ("stop_gradient", "floor", "ceil", "round", "sign")
# Each operand flows to its own result alone.
_PAIRWISE = ("psum", "optimization_barrier")
# Their derivative is the user's, so what is inside is never transposed.
_OWN_RULE = ("custom_vjp_call", "linear_call")
# Their derivative is that of what is inside. All others count as functions of all operands: the
# rule of a custom_jvp (a straight-through estimator) may depend on more than its body does.
_TRANSPARENT = (
    *("jit", "pjit", "remat2", "checkpoint", "shard_map", "closed_call", "core_call"),
    *("scan", "while", "cond"),
)

_Pairs = list[tuple[Any, Any]]


class Collective(NamedTuple):
    """A collective on a differentiated path."""

    primitive: str
    axes: tuple[str, ...]  # all named axes of the primitive
    source: str  # "file:line:column (function)", or "unknown"


class _Body(NamedTuple):
    """A jaxpr inside an equation, and how values flow into, out of and around it."""

    jaxpr: Any
    enter: _Pairs  # (outside, inside)
    leave: _Pairs  # (inside, outside)
    back: _Pairs  # (inside, inside): what one iteration hands to the next


def differentiated_collectives(
    jaxpr: Any,
    active: Sequence[bool],
    live: Sequence[bool],
    axis_names: Collection[str],
    names: Collection[str] = _WRONG_TRANSPOSE,
) -> list[Collective]:
    """Returns the collectives that a derivative would transpose, in program order.

    Args:
      jaxpr: the function, traced inside the manual region, before differentiation: after it, calls
        of `custom_vjp` functions are inlined and look like anything else.
      active: for each input of the jaxpr, whether it is differentiated.
      live: for each output, whether it is (the loss is, aux is not).
      axis_names: the axes of interest, manual where the jaxpr was traced. (A shard_map inside it
        transposes collectives over the axes that it makes manual itself right.)
      names: the primitives of interest.
    """
    jaxpr = open_jaxpr(jaxpr)
    inputs = {v for v, on in zip(jaxpr.invars, active, strict=True) if on and _has_tangent(v)}
    outputs = {v for v, on in zip(jaxpr.outvars, live, strict=True) if on and _has_tangent(v)}
    reached = _reach(jaxpr, inputs, True), _reach(jaxpr, outputs, False)
    return list(_collect(jaxpr, *reached, axis_names, names))


def _collect(
    jaxpr: Any,
    active: set[Any],
    live: set[Any],
    axis_names: Collection[str],
    names: Collection[str],
) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        axes = _axes(eqn)
        if (
            eqn.primitive.name in names
            and any(a in axis_names for a in axes)
            and any(a in active and b in live for a, b in _edges(eqn))
        ):
            source = source_info_util.summarize(eqn.source_info)
            yield Collective(eqn.primitive.name, axes, source)
        for body in _bodies(eqn):
            inside = _inside(body, active, True), _inside(body, live, False)
            yield from _collect(body.jaxpr, *inside, axis_names, names)


def _reach(jaxpr: Any, start: set[Any], forward: bool) -> set[Any]:
    """Returns the variables of a jaxpr that depend on `start`, or on which it depends."""
    reached = set(start)
    for eqn in jaxpr.eqns if forward else reversed(jaxpr.eqns):
        if eqn.primitive.name not in _TRANSPARENT:
            reached |= _image(_edges(eqn), reached, forward)
            continue
        for body in _bodies(eqn):
            inside = _inside(body, reached, forward)
            reached |= _image(body.leave if forward else body.enter, inside, forward)
    return reached


def _inside(body: _Body, outside: set[Any], forward: bool) -> set[Any]:
    """Returns what is reached inside a body, over any number of iterations."""
    start = _image(body.enter if forward else body.leave, outside, forward)
    while start:
        reached = _reach(body.jaxpr, start, forward)
        again = _image(body.back, reached, forward)
        if again <= start:
            return reached
        start |= again
    return set()


def _image(pairs: _Pairs, start: set[Any], forward: bool) -> set[Any]:
    if forward:
        return {b for a, b in pairs if a in start}
    return {a for a, b in pairs if b in start}


def _edges(eqn: Any) -> _Pairs:
    """Returns the pairs (input, output) of an equation between which there is a derivative."""
    if eqn.primitive.name in _FLAT:
        return []
    if eqn.primitive.name in _PAIRWISE:
        return _differentiable(zip(eqn.invars, eqn.outvars, strict=True))
    # A ref is an output too: it may be written, with any of the operands.
    return _differentiable(itertools.product(eqn.invars, [*eqn.outvars, *_refs(eqn.invars)]))


def _bodies(eqn: Any) -> list[_Body]:
    """Returns the jaxprs inside an equation that its derivative looks into."""
    name, inputs, found = eqn.primitive.name, eqn.invars, sub_jaxprs(eqn)
    if name in _OWN_RULE:
        return []
    if name == "while":  # the condition has no derivative
        inputs = inputs[eqn.params["cond_nconsts"] :]
        found = [open_jaxpr(eqn.params["body_jaxpr"])]
    elif name == "cond":  # nor has the index of the branch
        inputs = inputs[1:]
    matched = all(
        len(inner.invars) == len(inputs) and len(inner.outvars) == len(eqn.outvars)
        for inner in found
    )
    return [_body(eqn, inputs, inner, matched) for inner in found]


def _body(eqn: Any, inputs: Sequence[Any], inner: Any, matched: bool) -> _Body:
    refs = _refs(inner.invars)
    enter: Iterable[tuple[Any, Any]]
    leave: Iterable[tuple[Any, Any]]
    if matched:
        enter = list(zip(inputs, inner.invars, strict=True))
        written = [(inside, outside) for outside, inside in enter if inside in refs]
        leave = [*zip(inner.outvars, eqn.outvars, strict=True), *written]
    else:
        enter = itertools.product(inputs, inner.invars)
        leave = itertools.product([*inner.outvars, *refs], [*eqn.outvars, *_refs(inputs)])
    # What is written into a ref in one iteration is read in the next.
    back = [*_carry(eqn, inputs, inner), *((r, r) for r in refs)]
    return _Body(inner, _differentiable(enter), _differentiable(leave), _differentiable(back))


def _carry(eqn: Any, inputs: Sequence[Any], inner: Any) -> _Pairs:
    """Returns the pairs (output, input) of a loop's body that are one carried value."""
    if eqn.primitive.name not in ("scan", "while"):
        return []
    # By rank, as jax 0.12 has no counts: the body's inputs are constants, carry, xs; its outputs
    # carry, ys.
    n = len(inner.outvars) - _slices(eqn.outvars, inner.outvars)
    end = len(inner.invars) - _slices(inputs, inner.invars)
    return list(zip(inner.outvars[:n], inner.invars[end - n : end], strict=True))


def _slices(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Returns how many values have an axis more outside a loop (types of users have no rank)."""
    ranks = ([getattr(v.aval, "ndim", 0) for v in variables] for variables in (outside, inside))
    return sum(a != b for a, b in zip(*ranks, strict=True))


def _refs(variables: Sequence[Any]) -> list[Any]:
    return [v for v in variables if isinstance(v.aval, AbstractRef)]


def _differentiable(pairs: Iterable[tuple[Any, Any]]) -> _Pairs:
    return [(a, b) for a, b in pairs if _has_tangent(a) and _has_tangent(b)]


def _has_tangent(v: Any) -> bool:
    if isinstance(v, jex_core.Literal):
        return False
    # Types of the user's own have no dtype; they may hold anything.
    dtype = getattr(v.aval, "dtype", None)
    return dtype is None or bool(jnp.issubdtype(dtype, jnp.inexact))


def _axes(eqn: Any) -> tuple[str, ...]:
    """Returns the named axes of a collective (a number is an axis of a vmap)."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = named if isinstance(named, tuple | list | set | frozenset) else (named,)
    return tuple(a for a in named if isinstance(a, str))
