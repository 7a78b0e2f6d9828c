"""What a step costs to compute: of its traced program, and by the compiler's own account."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
from jax.extend import core

# What backends give, in the order of the table. TPUs give all, CPUs no time, GPUs that are not
# here nothing. Keys with a digit are of single operands.
COMPILERS = {
    "flops": "FLOPs",
    "bytes accessed": "bytes accessed",
    "optimal_seconds": "seconds",
}
_BODIES_RUN_UNKNOWN = ("while", "pallas_call")


def flops(traced: Any, devices: int) -> int | None:
    """Return the FLOPs of matrix products and convolutions on each device; loops multiplied out.

    Of the traced program: what runs whole is taken to divide evenly between the devices, what is
    inside a `shard_map` is counted on each of them. Of a branch, the dearest counts. None where it
    is unknown how often a product runs.

    Args:
      traced: `jax.jit(f).trace(*shapes)`.
      devices: of the mesh.
    """
    total = _flops(traced.jaxpr)
    return None if total is None else total // devices


def _flops(jaxpr: Any) -> int | None:
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found = _of_equation(eqn)
        if found is None:
            return None
        total += found
    return total


def _of_equation(eqn: Any) -> int | None:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * eqn.outvars[0].aval.size * kernel.size // features
    inner = [
        _flops(item)
        for value in params.values()
        for item in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(item, core.Jaxpr | core.ClosedJaxpr)
    ]
    known = [count for count in inner if count is not None]
    if len(known) < len(inner):
        return None
    if name in _BODIES_RUN_UNKNOWN:
        return None if any(known) else 0
    if name == "cond":
        return max(known)
    times = params["length"] if name == "scan" else 1
    if name == "shard_map":
        # jax 0.10.0 names them otherwise.
        manual = params.get("newly_manual_axes", params.get("manual_axes"))
        times = math.prod(params["mesh"].shape[axis] for axis in manual)
    return times * sum(known)


def of_compiler(program: jax.stages.Compiled) -> dict[str, float]:
    """Return the compiler's estimate of one call; XLA counts the body of each loop once."""
    try:
        given = program.cost_analysis()
    except Exception:  # a backend without one: which error it raises differs
        given = None
    found = {key: (given or {}).get(key) for key in COMPILERS}
    # XLA writes -1 or -2 for what it does not know.
    return {key: float(value) for key, value in found.items() if value is not None and value >= 0}


def instructions(program: jax.stages.Compiled) -> int:
    """Return the number of instructions of the optimised program."""
    text = program.as_text() or ""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))
