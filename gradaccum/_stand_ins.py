"""Stand-ins for stacks of layers that are cast before their scan, for their gradients.

The gradient of a cast stack leaves the layers' scan as a whole stack in the cast's dtype, and is
then cast back and added to the accumulator. With a stand-in in the accumulator's dtype, which the
scan takes beside the stack, each layer's gradient is cast and added inside the backward pass.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from gradaccum._jaxpr import is_variable, open_jaxpr
from gradaccum._mesh import vary, varying_axes

# What a scan's equation says on jax 0.10 and 0.12: with more, it would not be rebuilt as it is.
_SCAN = {"jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry", "ft_in", "ft_out"}


class _Place(NamedTuple):
    """Where a stack enters a scan."""

    eqn: int  # which of the program's equations is the scan
    at: int  # which of its operands is the stack
    leaf: int  # which of the program's inputs that was


def with_stand_ins(
    program: Any, dtypes: Mapping[int, Any], sample: Sequence[Any]
) -> tuple[Any, list[int]]:
    """Returns the program with one input more for each stack of layers that is cast.

    Args:
      program: the traced loss of one microbatch.
      dtypes: of the inputs that may have a stand-in, the dtype of their accumulator.
      sample: the program's inputs.

    Returns:
      The program, which takes the stand-ins last, shaped as the inputs that they stand for and of
      any value; and these inputs' indices. The cotangent of a stand-in is that of its input.
    """
    jaxpr = open_jaxpr(program)
    places = _places(jaxpr, dtypes)
    if not places:
        return program, []
    indices = [place.leaf for place in places]

    def fun(*inputs: Any) -> list[Any]:
        arrays, stand_ins = inputs[: len(sample)], inputs[len(sample) :]
        given = {(p.eqn, p.at): s for p, s in zip(places, stand_ins, strict=True)}
        return _evaluate(jaxpr, program.consts, arrays, given)

    zeros = [
        vary(jnp.zeros(x.shape, dtypes[i]), varying_axes(x))
        for i, x in zip(indices, (sample[i] for i in indices), strict=True)
    ]
    return jax.make_jaxpr(fun)(*sample, *zeros), indices


def _places(jaxpr: Any, dtypes: Mapping[int, Any]) -> list[_Place]:
    """Returns where inputs go, each by itself, through a cast or not, into one scan alone."""
    uses: dict[Any, int] = collections.Counter(v for v in jaxpr.outvars if is_variable(v))
    users = {}
    for number, eqn in enumerate(jaxpr.eqns):
        for at, v in enumerate(eqn.invars):
            if is_variable(v):
                uses[v] += 1
                users[v] = (number, at)
    places = []
    for leaf, dtype in dtypes.items():
        stack = jaxpr.invars[leaf]
        user = jaxpr.eqns[users[stack][0]] if uses[stack] == 1 and stack in users else None
        if user is not None and user.primitive.name == "convert_element_type":
            (cast,) = user.outvars
            # Else casting the gradient to the accumulator alone would round less than both casts.
            exact = jnp.promote_types(stack.aval.dtype, cast.aval.dtype) == stack.aval.dtype
            stack = cast if exact and jnp.issubdtype(cast.aval.dtype, jnp.floating) else stack
        if uses[stack] != 1 or stack not in users or stack.aval.dtype == dtype:
            continue
        number, at = users[stack]
        eqn = jaxpr.eqns[number]
        if eqn.primitive.name == "scan" and eqn.params.keys() <= _SCAN and _is_scanned(eqn, at):
            places.append(_Place(number, at, leaf))
    return places


def _is_scanned(eqn: Any, at: int) -> bool:
    """True if the operand is scanned over: it loses its leading axis."""
    return bool(
        open_jaxpr(eqn.params["jaxpr"]).invars[at].aval.ndim == eqn.invars[at].aval.ndim - 1
    )


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], given: Mapping[Any, Any]
) -> list[Any]:
    """Evaluates a jaxpr; `given` are the stand-ins of operands of its scans."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True))

    def read(v: Any) -> Any:
        return values[v] if is_variable(v) else v.val

    def run(eqns: list[Any]) -> None:
        made = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, jex_core.DropVar)]
        used = [v for eqn in eqns for v in eqn.invars if is_variable(v)]
        needed = dict.fromkeys(v for v in used if v in values)
        part = jex_core.Jaxpr((), list(needed), made, eqns, debug_info=jaxpr.debug_info)
        fun = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(part, ()))
        values.update(zip(made, fun(*map(read, needed)), strict=True))

    waiting: list[Any] = []
    for number, eqn in enumerate(jaxpr.eqns):
        own = {at: x for (scan, at), x in given.items() if scan == number}
        if own:
            run(waiting)
            waiting = []
            outputs = _scan(eqn, [read(v) for v in eqn.invars], own)
            values.update(zip(eqn.outvars, outputs, strict=True))
        else:
            waiting.append(eqn)
    run(waiting)
    return [read(v) for v in jaxpr.outvars]


def _scan(eqn: Any, operands: Sequence[Any], stand_ins: Mapping[int, Any]) -> list[Any]:
    """Evaluates the equation of a scan whose operands have stand-ins."""
    body = eqn.params["jaxpr"]
    inside = open_jaxpr(body)
    xs = [i for i in range(len(operands)) if _is_scanned(eqn, i)]
    # What a scan returns is its carry, then one more axis on what its body returns.
    carried = sum(
        v.aval.ndim == inner.aval.ndim for v, inner in zip(eqn.outvars, inside.outvars, strict=True)
    )
    first = len(operands) - len(xs)
    fun = jex_core.jaxpr_as_fun(body)

    def step(carry: list[Any], x: tuple[list[Any], dict[int, Any]]) -> tuple[list[Any], list[Any]]:
        slices, own = x
        read = [_read(s, own[i]) if i in own else s for i, s in zip(xs, slices, strict=True)]
        outputs = fun(*operands[: first - carried], *carry, *read)
        return outputs[:carried], outputs[carried:]

    carry, rows = jax.lax.scan(
        step,
        list(operands[first - carried : first]),
        (list(operands[first:]), dict(stand_ins)),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *rows]


@jax.custom_jvp
def _read(x: jax.Array, stand_in: jax.Array) -> jax.Array:
    """Returns `x`, whose gradient is that of `stand_in`."""
    del stand_in
    return x


@_read.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    # The very value: another one would be a residual of its own beside the stack.
    return primals[0], tangents[1].astype(primals[0].dtype)
