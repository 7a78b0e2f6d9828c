"""What `MultiSteps` checks of its gradients, parameters, schedule and skips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum._comm import check_hook
from gradaccum._mesh import DataMesh, varying_axes
from gradaccum._state import has_rows
from gradaccum._unreduced_checks import check_no_rows, check_rows, check_untouched, kind_of

_MOST = np.iinfo(np.int32).max  # what the counters hold


def check_arguments(opt: Any, use_grad_mean: Any) -> None:
    """Raises TypeError for what is no optimizer, or no bool."""
    if not hasattr(opt, "init") or not hasattr(opt, "update"):
        raise TypeError(
            f"MultiSteps: opt is {opt!r}; it must be an optax.GradientTransformation, such as "
            "optax.adamw(3e-4)."
        )
    if not isinstance(use_grad_mean, bool | np.bool_):
        raise TypeError(
            f"MultiSteps: use_grad_mean is {use_grad_mean!r}; it must be a bool. (Data axes go by "
            "name: axis_name=...)"
        )


def check_comm_hook(hook: Any, axis_name: Any) -> None:
    """Raises TypeError for no communication hook, ValueError where no data axis is named."""
    if check_hook("MultiSteps", hook) is not None and axis_name is None:
        raise ValueError(
            f"MultiSteps: comm_hook={hook!r} without axis_name: plain gradients are averaged "
            "already. Give the data axes, and Unreduced gradients."
        )


def check_comm_state(state: Any, hook: Any) -> None:
    """Raises ValueError if a state holds that of a communication hook, and there is none."""
    if hook is None and jax.tree.leaves(state.comm_state):
        raise ValueError(
            f"MultiSteps: the state holds a {type(state.comm_state).__name__} of a communication "
            "hook, but comm_hook was not given. Give the hook that it is of; or, to go on without, "
            "state._replace(comm_state=())."
        )


def _misfits(paths: Sequence[str], got: Sequence[Any], wanted: Sequence[Any]) -> str:
    triples = zip(paths, got, wanted, strict=True)
    return "; ".join(
        f"{p} has {tuple(g)}, its accumulator {tuple(w)}" for p, g, w in triples if g != w
    )


def check_gradients(
    api: str, tree: Any, got: Sequence[Any], wanted_tree: Any, wanted: Sequence[Any]
) -> None:
    """Raises ValueError unless gradients have the structure and shapes of their accumulators.

    Args:
      api: what raises.
      tree: the structure of the gradients.
      got: their shapes.
      wanted_tree: the structure of the accumulators.
      wanted: their shapes.
    """
    if tree != wanted_tree:
        raise ValueError(
            f"{api}: the gradients have the structure {tree}, the parameters given to init had "
            f"{wanted_tree}. Give gradients of the same parameters."
        )
    bad = _misfits(_paths(tree, "the gradient"), got, wanted)
    if bad:
        raise ValueError(
            f"{api}: shapes differ (with axis_name the first size is the rows, one a data device): "
            f"{bad}. Give gradients of the parameters given to init; for another number of devices "
            "move the state with resize(state, mesh)."
        )


def check_parameters(
    tree: Any, got: Sequence[Any], wanted_tree: Any, wanted: Sequence[Any]
) -> None:
    """Raises ValueError unless the parameters given to `flush` are those given to `init`."""
    if tree != wanted_tree:
        raise ValueError(
            f"MultiSteps.flush: params have the structure {tree}, those given to init had "
            f"{wanted_tree}. Give the parameters that update is given."
        )
    bad = _misfits(_paths(tree, "the parameter"), got, wanted)
    if bad:
        raise ValueError(
            f"MultiSteps.flush: params of other shapes than those given to init: {bad}. Give the "
            "parameters that update is given. (Inside a shard_map that splits them over the data "
            "axes: flush outside of it.)"
        )


def _paths(tree: Any, alone: str) -> list[str]:
    keyed = jax.tree_util.tree_leaves_with_path(tree.unflatten(range(tree.num_leaves)))
    return [jax.tree_util.keystr(path) or alone for path, _ in keyed]


def check_skip_state(new: Any, old: Any) -> None:
    """Raises TypeError unless a skip_state has the structure, shapes and axes of the old one."""

    def kinds(tree: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)

    def shapes(tree: Any) -> list[Any]:
        return [jax.tree.structure(tree), *map(jnp.shape, jax.tree.leaves(tree))]

    if shapes(new) != shapes(old):
        raise TypeError(
            f"MultiSteps: should_skip_update_fn returned the skip_state {kinds(new)}; at init it "
            f"was {kinds(old)}. Return the same structure and shapes in every call."
        )
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    axes = {a for x, y in pairs for a in varying_axes(x) - varying_axes(y)}
    if axes:
        names = ", ".join(map(repr, sorted(axes)))
        raise TypeError(
            f"MultiSteps: the skip_state of should_skip_update_fn varies over {names}: it was "
            "computed from one device's shard. Reduce it there, e.g. jax.lax.psum over that axis."
        )


def check_steps(value: Any, gradient_step: Any) -> None:
    """Raises ValueError unless a k that is known is a whole number >= 1."""
    known = np.asarray(value)
    number = known.shape == () and known.dtype != bool and np.issubdtype(known.dtype, np.number)
    if not number or not 1 <= known <= _MOST or known != int(known):
        at = (
            ""
            if isinstance(gradient_step, jax.core.Tracer)
            else f" at gradient step {gradient_step}"
        )
        raise ValueError(
            f"MultiSteps: every_k_schedule gives k = {value!r}{at}; it must be a whole number "
            ">= 1 (and < 2**31), in calls."
        )


def check_skip(returned: Any) -> tuple[jax.Array, Any]:
    """Returns what `should_skip_update_fn` returned, or raises ValueError."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValueError(
            f"MultiSteps: should_skip_update_fn returned {kind_of(returned)}; it must return "
            "a pair: a boolean scalar array, and a tree to keep as skip_state."
        )
    value, skip_state = jnp.asarray(returned[0]), returned[1]
    if value.dtype != jnp.bool_ or value.shape != ():
        raise ValueError(
            f"MultiSteps: should_skip_update_fn returned {value.dtype}{list(value.shape)}; it must "
            "return a boolean scalar array, and a tree to keep as skip_state."
        )
    return value, skip_state


def check_extra(api: str, rows: Mapping[str, Any], where: DataMesh | None) -> None:
    """Raises unless `Unreduced` values among the extra arguments can be reduced here."""
    if where is None:
        check_no_rows(api, list(rows))
        return
    check_untouched(api, [path for path, x in rows.items() if not x.is_whole()])
    if rows:
        check_rows(api, {x.sum.shape[0] for x in rows.values()}, where)


def check_our_state(state: Any, *, rows: bool) -> None:
    """Raises TypeError for a state that is not of `MultiSteps`, or of one with other rows."""
    if not hasattr(state, "weight") or not hasattr(state, "updated"):
        kind = f"{type(state).__module__}.{type(state).__name__}"
        raise TypeError(
            f"MultiSteps: the state is a {kind}; give what init, update or resize returned. From "
            "optax.MultiSteps one moves over between two windows: "
            "tx.init(params)._replace(gradient_step=..., inner_opt_state=...)."
        )
    if rows != has_rows(state):
        made, used = ("without", "with") if rows else ("with", "without")
        raise TypeError(
            f"MultiSteps: the state was made {made} axis_name and is used {used} it. Give "
            "axis_name in both places or in none."
        )
