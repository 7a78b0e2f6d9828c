"""What a traced program does with a value: read-only walks over jaxprs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.ref import AbstractRef

# These read a slice of their operand, and before jax 0.12 cannot add a cotangent into a ref.
_SLICES = ("slice", "dynamic_slice")
# Calls whose transpose takes the cotangents of its operands by value, one by one.
_BY_VALUE = ("remat2", "checkpoint", "custom_vjp_call")
# These name an axis without communicating over it.
_SILENT = ("axis_index", "pvary", "pcast")


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a closed one (from jax 0.12 there is only one kind)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def as_function(program: Any) -> Callable[..., list[Any]]:
    """Returns a jaxpr as a function of arrays to arrays; a constant output may be a literal."""
    fun = jex_core.jaxpr_as_fun(program)

    def arrays(*args: Any) -> list[Any]:
        outputs = zip(fun(*args), program.out_avals, strict=True)
        return [x if isinstance(x, jax.Array) else jnp.asarray(x, a.dtype) for x, a in outputs]

    return arrays


def sub_jaxprs(eqn: Any) -> list[Any]:
    """Returns the open jaxprs among the parameters of an equation."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex_core.Jaxpr | jex_core.ClosedJaxpr):
                found.append(open_jaxpr(item))
    return found


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of a jaxpr and of those nested in it."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in sub_jaxprs(eqn):
            yield from equations(inner)


def in_place_inputs(jaxpr: Any, wanted: Sequence[int], by_value: Sequence[int]) -> list[int]:
    """Returns the inputs whose cotangents may be added into a ref inside the backward pass.

    These are stacks of layers: their only use, through nested jits, is once as xs of one scan.
    There it is worth it, and right if in addition

    - none of the input's slices reaches a call of the scan's body twice (before jax 0.12 the two
      cotangents overwrite each other), nor a branch or a slice of its own in there, and a scan
      only as a stack of layers again;
    - every other xs of the scan that has a cotangent is added in place too (before jax 0.12 the
      cotangents of refs and of values among them change places).

    Args:
      jaxpr: the program, before differentiation.
      wanted: the indices of the inputs that are differentiated.
      by_value: those of them that have to go by value for another reason.
    """
    jaxpr = open_jaxpr(jaxpr)
    active = {jaxpr.invars[i] for i in wanted}
    refs = active - {jaxpr.invars[i] for i in by_value}
    while (safe := _safe_refs(jaxpr, refs, active)) != refs:
        refs = safe
    return [i for i in wanted if jaxpr.invars[i] in refs]


def _safe_refs(jaxpr: Any, refs: set[Any], active: set[Any]) -> set[Any]:
    """Returns those of the input variables `refs` that are safe if all of them are refs.

    `active` are the inputs that have a cotangent.
    """
    active = set(active)
    uses: dict[Any, int] = collections.Counter(v for v in jaxpr.outvars if is_variable(v))
    for eqn in jaxpr.eqns:
        variables = [v for v in eqn.invars if is_variable(v)]
        uses.update(variables)
        if active.intersection(variables):
            active.update(eqn.outvars)
    safe = set()
    for eqn in jaxpr.eqns:
        at = [i for i, v in enumerate(eqn.invars) if is_variable(v) and v in refs and uses[v] == 1]
        if at and eqn.primitive.name in ("jit", "pjit"):
            safe.update(_safe_in_jit(eqn, at, active))
        elif at and eqn.primitive.name == "scan":
            safe.update(_safe_in_scan(eqn, at, active))
    return safe


def _safe_in_jit(eqn: Any, at: Sequence[int], active: set[Any]) -> set[Any]:
    inner = open_jaxpr(eqn.params["jaxpr"])
    inner_active = {
        inside
        for inside, v in zip(inner.invars, eqn.invars, strict=True)
        if is_variable(v) and v in active
    }
    safe = _safe_refs(inner, {inner.invars[i] for i in at}, inner_active)
    return {eqn.invars[i] for i in at if inner.invars[i] in safe}


def _safe_in_scan(eqn: Any, at: Sequence[int], active: set[Any]) -> set[Any]:
    body = open_jaxpr(eqn.params["jaxpr"])
    # Constants and carries enter the body whole; xs lose their leading axis.
    xs = [
        i
        for i, (inside, v) in enumerate(zip(body.invars, eqn.invars, strict=True))
        if inside.aval.ndim == v.aval.ndim - 1
    ]
    with_cotangent = [
        i
        for i in xs
        if is_variable(eqn.invars[i])
        and eqn.invars[i] in active
        and jnp.issubdtype(eqn.invars[i].aval.dtype, jnp.inexact)
    ]
    # A slice may be a stack of layers itself; whatever enters the body may have a cotangent.
    stacks = _safe_refs(body, {body.invars[i] for i in at}, set(body.invars))
    in_place = [
        i
        for i in at
        if i in xs and (body.invars[i] in stacks or _is_plainly_used(body, body.invars[i]))
    ]
    return {eqn.invars[i] for i in in_place} if in_place == with_cotangent else set()


def is_variable(v: Any) -> bool:
    """True for what has a name in a jaxpr, False for a constant."""
    return not isinstance(v, jex_core.Literal)


def _is_plainly_used(jaxpr: Any, var: Any) -> bool:
    """True if `var` reaches arithmetic, and calls at most once each."""
    for eqn in jaxpr.eqns:
        at = [i for i, v in enumerate(eqn.invars) if v is var]
        if not at:
            continue
        if eqn.primitive.name in _SLICES:
            return False
        inside = sub_jaxprs(eqn)
        # (A call without equations is that of a stand-in.)
        if eqn.primitive.name in _BY_VALUE or not any(jaxpr.eqns for jaxpr in inside):
            continue
        if len(at) > 1 or eqn.primitive.name not in ("jit", "pjit"):
            return False
        inner = open_jaxpr(eqn.params["jaxpr"])
        if not _is_plainly_used(inner, inner.invars[at[0]]):
            return False
    return True


def has_aliased_ref(jaxpr: Any) -> bool:
    """True if some equation, at any depth, is given one ref twice."""
    for eqn in equations(jaxpr):
        refs = [id(v) for v in eqn.invars if isinstance(v.aval, AbstractRef)]
        if len(refs) != len(set(refs)):
            return True
    return False


def computes_in(jaxpr: Any, dtype: Any) -> bool:
    """True if an input or any intermediate value has this dtype."""
    jaxpr, dtype = open_jaxpr(jaxpr), jnp.dtype(dtype)
    values = [*jaxpr.invars, *(v for eqn in equations(jaxpr) for v in eqn.outvars)]
    return any(getattr(v.aval, "dtype", None) == dtype for v in values)


def axes_of(eqn: Any) -> tuple[str, ...]:
    """Returns the named axes of a collective (a number is an axis of a vmap)."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = named if isinstance(named, tuple | list | set | frozenset) else (named,)
    return tuple(a for a in named if isinstance(a, str))


def collectives_over(jaxpr: Any, axis_names: tuple[str, ...]) -> list[str]:
    """Returns the names of the primitives that communicate over one of the axes."""
    found = []
    for eqn in equations(jaxpr):
        if eqn.primitive.name not in _SILENT and any(a in axis_names for a in axes_of(eqn)):
            found.append(eqn.primitive.name)
    return found
