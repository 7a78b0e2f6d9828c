"""What a traced program does with a value: read-only walks over jaxprs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex_core
from jax.ref import AbstractRef

# These read a slice of their operand, and before jax 0.12 cannot add a cotangent into a ref.
_SLICES = ("slice", "dynamic_slice")
# These name an axis without communicating over it.
_SILENT = ("axis_index", "pvary", "pcast")


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a closed one (from jax 0.12 there is only one kind)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


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


def _uses(jaxpr: Any, var: Any) -> list[tuple[Any, int]]:
    return [(eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.invars) if v is var]


def is_scanned_once(jaxpr: Any, var: Any) -> bool:
    """True if the only use of `var` is once as the xs of one scan.

    This is the pattern (a stack of layers) for which adding cotangents into a ref inside the
    backward pass is both right and worth it. A value that reaches one call twice must not: in
    jax 0.10 its two cotangents overwrite each other, silently. So the slices of `var` may not
    reach any call of the scan's body twice either.

    Args:
      jaxpr: the program, before differentiation.
      var: one of its input variables.
    """
    jaxpr = open_jaxpr(jaxpr)
    uses = _uses(jaxpr, var)
    if len(uses) != 1 or any(v is var for v in jaxpr.outvars):
        return False
    eqn, i = uses[0]
    if eqn.primitive.name in ("jit", "pjit"):
        inner = open_jaxpr(eqn.params["jaxpr"])
        return is_scanned_once(inner, inner.invars[i])
    if eqn.primitive.name == "scan":
        body = open_jaxpr(eqn.params["jaxpr"])
        # Constants and carries enter the body whole; xs lose their leading axis.
        is_xs = body.invars[i].aval.ndim == var.aval.ndim - 1
        return is_xs and _reaches_no_call_twice(body, body.invars[i])
    return False


def _reaches_no_call_twice(jaxpr: Any, var: Any) -> bool:
    for eqn in jaxpr.eqns:
        at = [i for i, v in enumerate(eqn.invars) if v is var]
        if not at:
            continue
        if eqn.primitive.name in _SLICES:
            return False
        inner = sub_jaxprs(eqn)
        if not inner:
            continue
        # One call, operands in the order of its inputs (jit, scan, remat, custom_jvp): look inside.
        if len(at) > 1 or len(inner) > 1 or len(inner[0].invars) != len(eqn.invars):
            return False
        if not _reaches_no_call_twice(inner[0], inner[0].invars[at[0]]):
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
    jaxpr = open_jaxpr(jaxpr)
    values = [*jaxpr.invars, *(v for eqn in equations(jaxpr) for v in eqn.outvars)]
    return any(getattr(v.aval, "dtype", None) == dtype for v in values)


def collectives_over(jaxpr: Any, axis_names: tuple[str, ...]) -> list[str]:
    """Returns the names of the primitives that communicate over one of the axes."""
    found = []
    for eqn in equations(jaxpr):
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        named = named if isinstance(named, tuple | list | set | frozenset) else (named,)
        if eqn.primitive.name not in _SILENT and any(a in named for a in axis_names):
            found.append(eqn.primitive.name)
    return found
