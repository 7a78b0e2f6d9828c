"""What `MultiSteps` does: a window of calls is added up, and closed by one step."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from gradaccum import _comm, _contracts
from gradaccum._given import read
from gradaccum._means import Awaited, is_small, means
from gradaccum._mesh import AxisName, DataMesh, find_mesh, mesh_of
from gradaccum._reduce import accumulator_of, any_device
from gradaccum._rows import settle, zero_rows, zeros
from gradaccum._state import MultiStepsState, as_before, own_buffers, strong, zeros_of
from gradaccum._unreduced import Unreduced, is_unreduced
from gradaccum._window_checks import (
    check_comm_state,
    check_extra,
    check_gradients,
    check_our_state,
    check_parameters,
    check_skip,
    check_skip_state,
    check_steps,
)

API = "MultiSteps"


def schedule_of(every_k: Any) -> Callable[[Any], Any]:
    """Returns k as a function of the gradient step, or raises TypeError, ValueError."""
    if callable(every_k):
        fun: Callable[[Any], Any] = every_k
        return fun
    is_array = isinstance(every_k, jax.Array) and every_k.shape == ()
    integer = (is_array and jnp.issubdtype(every_k.dtype, jnp.integer)) or (
        isinstance(every_k, numbers.Integral) and not isinstance(every_k, bool)
    )
    if not integer:
        raise TypeError(
            f"{API}: every_k_schedule is {every_k!r}; it must be an int >= 1, or a function of the "
            "gradient step that returns one, in calls."
        )
    if not isinstance(every_k, jax.core.Tracer):
        check_steps(every_k, "0 and after")
    return lambda gradient_step: every_k


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """The rule of one `MultiSteps`: its arguments, and what they do to a state."""

    opt: optax.GradientTransformationExtraArgs
    every_k: Callable[[Any], Any]
    use_grad_mean: bool
    should_skip: Callable[..., Any] | None
    accumulator_dtype: Any
    axis_name: AxisName | None
    mesh: Mesh | AbstractMesh | None
    comm_hook: Any = None

    def init(self, params: Any) -> MultiStepsState:
        step = jnp.zeros((), jnp.int32)
        self._steps(step)  # raises where k is known and wrong
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(params)
        leaves = [jnp.asarray(x) for x in leaves]
        dtypes = [accumulator_of(x.dtype, self.accumulator_dtype) for x in leaves]
        if self.axis_name is None:
            acc, weight = zeros(leaves, dtypes), jnp.zeros((), jnp.float32)
        else:
            where = find_mesh(API, self.axis_name, self.mesh, leaves)
            acc, weights = zero_rows(leaves, dtypes, where)
            weight = tree.unflatten(weights)
        comm_state: Any = ()
        if self.comm_hook is not None and self.axis_name is not None:
            comm_state = _comm.init_state(
                API, self.comm_hook, leaves, tree, dtypes, self.axis_name, where
            )
        skip_state: Any = ()
        if self.should_skip is not None:
            none = optax.tree.zeros_like(params)
            _, skip_state = check_skip(self.should_skip(none, step, params))
        inner, skip_state = jax.tree.map(strong, (self.opt.init(params), skip_state))
        state = MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=step,
            inner_opt_state=inner,
            acc_grads=tree.unflatten(acc),
            skip_state=skip_state,
            weight=weight,
            updated=jnp.zeros((), bool),
            comm_state=comm_state,
        )
        settled: MultiStepsState = settle(own_buffers(state, params), mesh_of(acc))
        return settled

    def update(
        self, updates: Any, state: MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MultiStepsState]:
        check_our_state(state, rows=self.axis_name is not None)
        check_comm_state(state, self.comm_hook)
        given = read(API, updates, self.axis_name, self.mesh)
        tree: Any
        acc, tree = jax.tree.flatten(state.acc_grads)
        shapes = [x.shape for x in given.sums], [x.shape for x in acc]
        check_gradients(API, given.tree, shapes[0], tree, shapes[1])
        k = self._steps(state.gradient_step)
        skip: Any = False
        counted = state._replace(mini_step=optax.safe_increment(state.mini_step))
        if given.where is None and self.should_skip is not None:
            skip, counted = self._skip(updates, counted, params)
            mini_step = jnp.where(skip, state.mini_step, counted.mini_step)
            counted = counted._replace(mini_step=mini_step)

        def add(sums: Any, weight: Any) -> tuple[Any, Any]:
            def sum_of(old: jax.Array, new: jax.Array) -> jax.Array:
                total = old + new.astype(old.dtype)
                return total if skip is False else jnp.where(skip, old, total)

            def added(old: Any, new: Sequence[jax.Array]) -> Any:
                form: Any
                leaves, form = jax.tree.flatten(old)
                return form.unflatten([sum_of(a, x) for a, x in zip(leaves, new, strict=True)])

            return added(sums, given.sums), added(weight, given.weights)

        full = (counted.mini_step >= k) & jnp.logical_not(skip)
        return self._close(counted, add, full, given.awaited, given.where, params, extra_args)

    def flush(
        self, state: MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MultiStepsState]:
        check_our_state(state, rows=self.axis_name is not None)
        check_comm_state(state, self.comm_hook)
        acc = jax.tree.leaves(state.acc_grads)
        where = None
        if self.axis_name is not None:
            where = find_mesh(f"{API}.flush", self.axis_name, self.mesh, params, acc)
        like = acc
        if params is not None:
            like = [jnp.asarray(x) for x in jax.tree.leaves(params)]
            check_parameters(
                jax.tree.structure(params),
                [x.shape for x in like],
                jax.tree.structure(state.acc_grads),
                [a.shape if where is None else a.shape[1:] for a in acc],
            )
        awaited = tuple(Awaited(dtype=x.dtype) for x in like)
        full = state.mini_step > 0
        same = lambda sums, weight: (sums, weight)  # noqa: E731
        return self._close(state, same, full, awaited, where, params, extra_args)

    def _close(
        self,
        state: MultiStepsState,
        add: Callable[[Any, Any], tuple[Any, Any]],
        full: Any,
        awaited: Sequence[Awaited],
        where: DataMesh | None,
        params: Any,
        extra_args: dict[str, Any],
    ) -> tuple[Any, MultiStepsState]:
        """Adds the call's gradients, by `add`; where the window is full makes the step.

        All communication is in the taken branch. Of rows, its condition depends on counters alone,
        the same on all devices; of plain gradients on the skip too, and nothing communicates.

        The sums do not pass through the first cond's branches, where XLA's CPU backend would copy
        them. A second one resets them in place, after the first: `closed` comes from there.
        """
        form: Any
        keyed, form = jax.tree_util.tree_flatten_with_path(extra_args, is_leaf=is_unreduced)
        extras = [x for _, x in keyed]
        rows = {jax.tree_util.keystr(path): x for path, x in keyed if is_unreduced(x)}
        check_extra(API, rows, where)

        none: Any = ()
        small = state._replace(acc_grads=none, weight=none, updated=jnp.zeros((), bool))

        def taken(state: MultiStepsState, sums: Any, weight: Any) -> tuple[Any, Any, jax.Array]:
            extra_rows = list(rows.values())
            grads, reduced, comm_state = self._mean(sums, weight, state, awaited, where, extra_rows)
            opened = state._replace(mini_step=jnp.zeros((), jnp.int32))

            def apply(grads: Any, state: MultiStepsState) -> tuple[Any, MultiStepsState]:
                left = iter(reduced)
                extra = form.unflatten([next(left) if is_unreduced(x) else x for x in extras])
                updates, inner = self.opt.update(grads, state.inner_opt_state, params, **extra)
                return updates, state._replace(
                    gradient_step=optax.safe_increment(state.gradient_step),
                    inner_opt_state=jax.tree.map(as_before, inner, state.inner_opt_state),
                    updated=jnp.ones((), bool),
                    comm_state=comm_state,
                )

            closed = jnp.ones((), bool)
            if where is None or self.should_skip is None:
                return *apply(grads, opened), closed
            skip, opened = self._skip(grads, opened, params)
            skip = any_device(skip, where, split=any(a.layout.cut for a in awaited))
            shapes = jax.eval_shape(apply, grads, opened)[0]
            dropped = lambda _, s: (jax.tree.map(zeros_of, shapes), s)  # noqa: E731
            return *jax.lax.cond(skip, dropped, apply, grads, opened), closed

        sums, weight = add(state.acc_grads, state.weight)
        shapes = jax.eval_shape(taken, small, sums, weight)[0]

        def waiting(state: MultiStepsState, *_: Any) -> tuple[Any, Any, jax.Array]:
            return jax.tree.map(zeros_of, shapes), state, jnp.zeros((), bool)

        updates, after, closed = jax.lax.cond(full, taken, waiting, small, sums, weight)
        sums, weight = jax.lax.cond(closed, _zeros, lambda x: x, (sums, weight))
        after = after._replace(acc_grads=sums, weight=weight)
        _contracts.check_state(after, state)
        return updates, after

    def _mean(
        self,
        total: Any,
        weight: Any,
        state: MultiStepsState,
        awaited: Sequence[Awaited],
        where: DataMesh | None,
        extras: Sequence[Unreduced],
    ) -> tuple[Any, list[jax.Array], Any]:
        """Returns the window's gradient, the means of `extras` and the state of the hook.

        This is the one reduction, of rows.
        """
        calls, comm_state = state.mini_step, state.comm_state
        tree: Any
        sums, tree = jax.tree.flatten(total)
        if where is None:
            divisor = weight if self.use_grad_mean else jnp.ones_like(weight)
            values = [
                (x / divisor.astype(x.dtype)).astype(a.dtype)
                for x, a in zip(sums, awaited, strict=True)
            ]
            return tree.unflatten(values), [], comm_state
        weights = jax.tree.leaves(weight)
        if any(is_small(a.reduce_dtype) for a in awaited):  # `Awaited.scale` is of one call
            sums, weights = ([x / calls.astype(x.dtype) for x in xs] for xs in (sums, weights))
        if not self.use_grad_mean:  # the mean, as many times as there were calls
            weights = [w / calls.astype(w.dtype) for w in weights]
        grads: list[jax.Array] = []
        if self.comm_hook is not None:
            given = _comm.unreduced_of(
                API, self.comm_hook, tree, sums, weights, awaited, self.axis_name, where
            )
            mean, comm_state = _comm.call(API, self.comm_hook, given, comm_state)
            grads, sums, weights, awaited = jax.tree.leaves(mean), [], [], []
        count = len(sums)
        sums = [*sums, *(x.sum for x in extras)]
        weights = [*weights, *(x.weight for x in extras)]
        ways = [*awaited, *(x.awaited for x in extras)]
        values = means(sums, weights, ways, where) if sums else []
        return tree.unflatten([*grads, *values[:count]]), values[count:], comm_state

    def _steps(self, gradient_step: jax.Array) -> Any:
        """Returns k, checked where it is known."""
        k = self.every_k(gradient_step)
        if not isinstance(k, jax.core.Tracer):
            check_steps(k, gradient_step)
        return k

    def _skip(
        self, grads: Any, state: MultiStepsState, params: Any
    ) -> tuple[jax.Array, MultiStepsState]:
        """Returns whether to skip, and the state with what the function wants kept."""
        assert self.should_skip is not None
        skip, kept = check_skip(self.should_skip(grads, state.gradient_step, params))
        check_skip_state(kept, state.skip_state)
        return skip, state._replace(skip_state=jax.tree.map(as_before, kept, state.skip_state))


def _zeros(tree: Any) -> Any:
    return jax.tree.map(zeros_of, jax.tree.map(jax.typeof, tree))
