"""The state of `MultiSteps`, and what keeps it of one type and donatable."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum._mesh import vary, varying_axes


class MultiStepsState(NamedTuple):
    """The state of `gradaccum.MultiSteps`: optax's fields by optax's names, then ours.

    Attributes:
      mini_step: int32 `[]`, the calls that the open window holds.
      gradient_step: int32 `[]`, the steps taken.
      inner_opt_state: the state of the wrapped optimizer.
      acc_grads: what the open window adds up to, in the structure of the parameters: `[*shape]`,
        with `axis_name` `[n, *shape]`, one row a data device.
      skip_state: what `should_skip_update_fn` returned last.
      weight: what `acc_grads` is to be divided by, float32: the number of calls `[]`; or
        for each leaf `[n]`, the sum of its `Unreduced.weight`.
      updated: bool `[]`, whether the last call made a step.
      comm_state: the state of `comm_hook`, `()` without one; what is dropped leaves it as it was.

    `init`, jitted or not, lays `acc_grads` and `weight` out. Where you do (`out_shardings`), put
    the data axes before the parameter's own spec: with that alone, every device would hold all
    rows.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: Any
    acc_grads: Any
    skip_state: Any
    weight: Any
    updated: jax.Array
    comm_state: Any = ()


class Residual(NamedTuple):
    """What each data device has its own of, in the state of a communication hook.

    Attributes:
      rows: a tree of arrays `[r, *shape]`, one row a device along the axes that are compressed,
        in units of the mean; None for what has none. All else in a state is the same everywhere.
    """

    rows: Any


def has_rows(state: Any) -> bool:
    """Whether a state has one row a data device of each accumulator."""
    weights = jax.tree.leaves(state.weight)
    return not weights or weights[0].ndim > 0


def zeros_of(x: Any) -> jax.Array:
    """Returns zeros of a type: shape, dtype, layout on Explicit axes, what it varies over."""
    explicit = getattr(getattr(x.sharding, "mesh", None), "explicit_axes", ())
    zeros = jnp.zeros_like(x) if explicit else jnp.zeros(x.shape, x.dtype)
    return vary(zeros, varying_axes(x))


def as_before(new: Any, old: Any) -> Any:
    """Returns the new leaf of a state in the old one's dtype."""
    new = strong(new)
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def strong(x: Any) -> Any:
    """Returns a leaf as an array without weak type, so that a step does not change its type."""
    x = jnp.asarray(x)
    weak = getattr(jax.typeof(x), "weak_type", False)
    return jax.lax.convert_element_type(x, x.dtype) if weak else x


def own_buffers(state: MultiStepsState, params: Any) -> MultiStepsState:
    """Copies arrays that the state shares with the parameters, or has twice: it can be donated."""
    seen = {id(x) for x in jax.tree.leaves(params)}

    def own(x: Any) -> Any:
        if id(x) in seen and not isinstance(x, jax.core.Tracer):
            x = jnp.copy(x)
        seen.add(id(x))
        return x

    owned: MultiStepsState = jax.tree.map(own, state)
    return owned
