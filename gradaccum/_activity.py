"""Which collectives of a loss function lie on a differentiated path: walks over its jaxpr.

A value is *active* if it depends differentiably on a differentiated input, and *live* if the loss
depends differentiably on it. Both are reachability along the same pairs (input, output) of each
equation: active walks them forward in program order, live walks them back in reverse order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import source_info_util
from jax.ref import AbstractRef

from gradaccum._jaxpr import axes_of, is_variable, open_jaxpr, sub_jaxprs

# With check_vma=False these transpose to the collective that is right only where every device
# holds its own cotangent: `psum` to a psum, `all_gather` to a psum_scatter. `pmean` is a psum.
_WRONG_TRANSPOSE = ("psum", "all_gather")
# Their derivative is zero.
_FLAT = ("stop_gradient", "floor", "ceil", "round", "sign")
# Each operand flows to its own result alone.
PAIRWISE = ("psum", "optimization_barrier")
# Their derivative is the user's, so what is inside is never transposed.
OWN_RULE = ("custom_vjp_call", "linear_call")
# Their derivative is that of what is inside. All others count as functions of all operands: the
# rule of a custom_jvp (a straight-through estimator) may depend on more than its body does.
TRANSPARENT = (
    *("jit", "pjit", "remat2", "checkpoint", "shard_map", "closed_call", "core_call"),
    *("scan", "while", "cond"),
)

Pairs = list[tuple[Any, Any]]


class Collective(NamedTuple):
    """A collective on a differentiated path."""

    primitive: str
    axes: tuple[str, ...]  # all named axes of the primitive
    source: str  # "file:line:column (function)", or "unknown"


class Body(NamedTuple):
    """A jaxpr inside an equation, and how values flow into, out of and around it."""

    jaxpr: Any
    enter: Pairs  # (outside, inside)
    leave: Pairs  # (inside, outside)
    back: Pairs  # (inside, inside): what one iteration hands to the next

    def mapped(self, change: Callable[[Iterable[tuple[Any, Any]]], Pairs]) -> Body:
        return Body(self.jaxpr, *map(change, (self.enter, self.leave, self.back)))


class Flow(NamedTuple):
    """What flows from where to where: of each equation, around its bodies and through them."""

    edges: Callable[[Any], Pairs]  # (input, output)
    bodies: Callable[[Any], list[Body]]


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
    inputs = {v for v, on in zip(jaxpr.invars, active, strict=True) if on and has_tangent(v)}
    outputs = {v for v, on in zip(jaxpr.outvars, live, strict=True) if on and has_tangent(v)}
    reached = reach(jaxpr, inputs, True), reach(jaxpr, outputs, False)
    return list(_collect(jaxpr, *reached, axis_names, names))


def _collect(
    jaxpr: Any,
    active: set[Any],
    live: set[Any],
    axis_names: Collection[str],
    names: Collection[str],
) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        axes = axes_of(eqn)
        if (
            eqn.primitive.name in names
            and any(a in axis_names for a in axes)
            and any(a in active and b in live for a, b in edges(eqn))
        ):
            source = source_info_util.summarize(eqn.source_info)
            yield Collective(eqn.primitive.name, axes, source)
        for body in differentiable_bodies(eqn):
            found = inside(body, active, True), inside(body, live, False)
            yield from _collect(body.jaxpr, *found, axis_names, names)


def reach(jaxpr: Any, start: set[Any], forward: bool, flow: Flow | None = None) -> set[Any]:
    """Returns what depends in a jaxpr on `start`, or on what `start` depends."""
    flow, reached = flow or DERIVATIVE, set(start)
    for eqn in jaxpr.eqns if forward else reversed(jaxpr.eqns):
        reached |= image(flow.edges(eqn), reached, forward)
        for body in flow.bodies(eqn):
            found = inside(body, reached, forward, flow)
            reached |= image(body.leave if forward else body.enter, found, forward)
    return reached


def inside(body: Body, outside: set[Any], forward: bool, flow: Flow | None = None) -> set[Any]:
    """Returns what is reached inside a body, over any number of iterations."""
    start = image(body.enter if forward else body.leave, outside, forward)
    while start:
        reached = reach(body.jaxpr, start, forward, flow)
        again = image(body.back, reached, forward)
        if again <= start:
            return reached
        start |= again
    return set()


def image(pairs: Pairs, start: set[Any], forward: bool) -> set[Any]:
    if forward:
        return {b for a, b in pairs if a in start}
    return {a for a, b in pairs if b in start}


def edges(eqn: Any) -> Pairs:
    """Returns the pairs (input, output) of an equation between which there is a derivative."""
    if eqn.primitive.name in _FLAT:
        return []
    if eqn.primitive.name in PAIRWISE:
        return differentiable(zip(eqn.invars, eqn.outvars, strict=True))
    # A ref is an output too: it may be written, with any of the operands.
    return differentiable(itertools.product(eqn.invars, [*eqn.outvars, *refs_among(eqn.invars)]))


def differentiable_bodies(eqn: Any) -> list[Body]:
    """Returns the jaxprs inside an equation that its derivative looks into."""
    if eqn.primitive.name in OWN_RULE:
        return []
    return [body.mapped(differentiable) for body in bodies(eqn)]


def bodies(eqn: Any) -> list[Body]:
    """Returns the jaxprs inside an equation, but for the condition of a loop."""
    name, inputs, found = eqn.primitive.name, eqn.invars, sub_jaxprs(eqn)
    if name == "while":
        inputs = inputs[eqn.params["cond_nconsts"] :]
        found = [open_jaxpr(eqn.params["body_jaxpr"])]
    elif name == "cond":  # the index of the branch doesn't enter it
        inputs = inputs[1:]
    matched = all(
        len(inner.invars) == len(inputs) and len(inner.outvars) == len(eqn.outvars)
        for inner in found
    )
    return [_body(eqn, inputs, inner, matched) for inner in found]


def _body(eqn: Any, inputs: Sequence[Any], inner: Any, matched: bool) -> Body:
    refs = refs_among(inner.invars)
    enter: Iterable[tuple[Any, Any]]
    leave: Iterable[tuple[Any, Any]]
    if matched:
        enter = list(zip(inputs, inner.invars, strict=True))
        written = [(inside, outside) for outside, inside in enter if inside in refs]
        leave = [*zip(inner.outvars, eqn.outvars, strict=True), *written]
    else:
        enter = itertools.product(inputs, inner.invars)
        leave = itertools.product([*inner.outvars, *refs], [*eqn.outvars, *refs_among(inputs)])
    # What is written into a ref in one iteration is read in the next.
    back = [*_carry(eqn, inputs, inner), *((r, r) for r in refs)]
    return Body(inner, list(enter), list(leave), back)


def _carry(eqn: Any, inputs: Sequence[Any], inner: Any) -> Pairs:
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


def refs_among(variables: Sequence[Any]) -> list[Any]:
    return [v for v in variables if isinstance(v.aval, AbstractRef)]


def differentiable(pairs: Iterable[tuple[Any, Any]]) -> Pairs:
    return [(a, b) for a, b in pairs if has_tangent(a) and has_tangent(b)]


def has_tangent(v: Any) -> bool:
    if not is_variable(v):
        return False
    # Types of the user's own have no dtype; they may hold anything.
    dtype = getattr(v.aval, "dtype", None)
    return dtype is None or bool(jnp.issubdtype(dtype, jnp.inexact))


# The flow of derivatives.
DERIVATIVE = Flow(
    edges=lambda eqn: [] if eqn.primitive.name in TRANSPARENT else edges(eqn),
    bodies=lambda eqn: differentiable_bodies(eqn) if eqn.primitive.name in TRANSPARENT else [],
)
