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

from gradaccum import _contracts
from gradaccum._given import read
from gradaccum._means import Awaited, means
from gradaccum._mesh import AxisName, DataMesh
from gradaccum._reduce import any_device, narrow
from gradaccum._rows import find_mesh, mesh_of, settle, zero_rows, zeros
from gradaccum._state import MultiStepsState, as_before, own_buffers, strong, zeros_of
from gradaccum._unreduced import Unreduced, is_unreduced
from gradaccum._window_checks import (
    check_accumulators,
    check_extra,
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

    def init(self, params: Any) -> MultiStepsState:
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(params)
        leaves = [jnp.asarray(x) for x in leaves]
        dtypes = [self._accumulator_of(x.dtype) for x in leaves]
        if self.axis_name is None:
            acc, weight = zeros(leaves, dtypes), jnp.zeros((), jnp.float32)
        else:
            where = find_mesh(API, self.axis_name, self.mesh, leaves)
            acc, weight = zero_rows(leaves, dtypes, where)
        step = jnp.zeros((), jnp.int32)
        skip_state: Any = ()
        if self.should_skip is not None:
            _, skip_state = self._skip(optax.tree.zeros_like(params), step, params)
        inner, skip_state = jax.tree.map(strong, (self.opt.init(params), skip_state))
        state = MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=step,
            inner_opt_state=inner,
            acc_grads=tree.unflatten(acc),
            skip_state=skip_state,
            weight=weight,
            updated=jnp.zeros((), bool),
        )
        self._steps(step)
        settled: MultiStepsState = settle(own_buffers(state, params), mesh_of(acc))
        return settled

    def update(
        self, updates: Any, state: MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MultiStepsState]:
        check_our_state(state, rows=self.axis_name is not None)
        given = read(API, updates, self.axis_name, self.mesh)
        tree: Any
        acc, tree = jax.tree.flatten(state.acc_grads)
        paths = [
            jax.tree_util.keystr(p) or "the gradient"
            for p, _ in jax.tree_util.tree_leaves_with_path(state.acc_grads)
        ]
        shapes = [(x.shape, a.shape) for x, a in zip(given.sums, acc, strict=False)]
        check_accumulators(API, given.tree, tree, dict(zip(paths, shapes, strict=False)))
        k = self._steps(state.gradient_step)
        added = state._replace(
            mini_step=optax.safe_increment(state.mini_step),
            acc_grads=tree.unflatten(
                [a + x.astype(a.dtype) for a, x in zip(acc, given.sums, strict=True)]
            ),
            weight=state.weight + given.weight,
        )
        full = added.mini_step >= k
        if given.where is None and self.should_skip is not None:
            skip, skip_state = self._skip(updates, state.gradient_step, params)
            kept = {
                name: jax.tree.map(
                    lambda new, old: jnp.where(skip, old, new),
                    getattr(added, name),
                    getattr(state, name),
                )
                for name in ("mini_step", "acc_grads", "weight")
            }
            skip_state = jax.tree.map(as_before, skip_state, state.skip_state)
            added = added._replace(skip_state=skip_state, **kept)
            full = full & ~skip
        return self._close(added, full, given.awaited, given.where, params, extra_args)

    def flush(
        self, state: MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MultiStepsState]:
        check_our_state(state, rows=self.axis_name is not None)
        acc = jax.tree.leaves(state.acc_grads)
        where = None
        if self.axis_name is not None:
            where = find_mesh(f"{API}.flush", self.axis_name, self.mesh, params, acc)
        like = acc
        if params is not None:
            keyed, tree = jax.tree_util.tree_flatten_with_path(params)
            like = [jnp.asarray(x) for _, x in keyed]
            own = [a.shape if where is None else a.shape[1:] for a in acc]
            paths = [jax.tree_util.keystr(path) or "the parameter" for path, _ in keyed]
            shapes = [(x.shape, shape) for x, shape in zip(like, own, strict=False)]
            check_parameters(
                tree, jax.tree.structure(state.acc_grads), dict(zip(paths, shapes, strict=False))
            )
        awaited = tuple(Awaited(dtype=x.dtype) for x in like)
        return self._close(state, state.mini_step > 0, awaited, where, params, extra_args)

    def _close(
        self,
        state: MultiStepsState,
        full: Any,
        awaited: Sequence[Awaited],
        where: DataMesh | None,
        params: Any,
        extra_args: dict[str, Any],
    ) -> tuple[Any, MultiStepsState]:
        """Makes the step and opens a new window where this one is full.

        All communication is in the taken branch. Its condition depends on counters alone, which
        are the same on all devices.
        """

        form: Any
        extras, form = jax.tree.flatten(extra_args, is_leaf=is_unreduced)
        rows = [x for x in extras if is_unreduced(x)]
        check_extra(API, rows, where)

        def step(grads: Any, extra: Any, state: MultiStepsState) -> tuple[Any, MultiStepsState]:
            updates, inner = self.opt.update(grads, state.inner_opt_state, params, **extra)
            inner = jax.tree.map(as_before, inner, state.inner_opt_state)
            count = optax.safe_increment(state.gradient_step)
            done = jnp.ones((), bool)
            return updates, state._replace(gradient_step=count, inner_opt_state=inner, updated=done)

        def taken(state: MultiStepsState) -> tuple[Any, MultiStepsState]:
            grads, reduced = self._mean(state, awaited, where, rows)
            opened = state._replace(
                mini_step=jnp.zeros((), jnp.int32),
                acc_grads=jax.tree.map(zeros_of, state.acc_grads),
                weight=zeros_of(state.weight),
                updated=jnp.zeros((), bool),
            )

            def apply(grads: Any, state: MultiStepsState) -> tuple[Any, MultiStepsState]:
                means = iter(reduced)
                extra = form.unflatten([next(means) if is_unreduced(x) else x for x in extras])
                return step(grads, extra, state)

            if where is None or self.should_skip is None:
                return apply(grads, opened)
            skip, skip_state = self._skip(grads, state.gradient_step, params)
            skip = any_device(skip, where, split=any(a.layout.cut for a in awaited))
            check_skip_state(skip_state, state.skip_state)
            skip_state = jax.tree.map(as_before, skip_state, state.skip_state)
            opened = opened._replace(skip_state=skip_state)
            shapes = jax.eval_shape(apply, grads, opened)[0]
            out: tuple[Any, MultiStepsState] = jax.lax.cond(
                skip, lambda _, s: (jax.tree.map(zeros_of, shapes), s), apply, grads, opened
            )
            return out

        shapes = jax.eval_shape(taken, state)[0]

        def waiting(state: MultiStepsState) -> tuple[Any, MultiStepsState]:
            return jax.tree.map(zeros_of, shapes), state._replace(updated=jnp.zeros((), bool))

        updates, after = jax.lax.cond(full, taken, waiting, state)
        _contracts.check_state(after, state)
        return updates, after

    def _mean(
        self,
        state: MultiStepsState,
        awaited: Sequence[Awaited],
        where: DataMesh | None,
        extras: Sequence[Unreduced],
    ) -> tuple[Any, list[jax.Array]]:
        """Returns the window's gradient and the means of `extras`: the one reduction, of rows."""
        tree: Any
        sums, tree = jax.tree.flatten(state.acc_grads)
        weight = state.weight
        if where is None:
            divisor = weight if self.use_grad_mean else jnp.ones_like(weight)
            values = [
                (x / divisor.astype(x.dtype)).astype(a.dtype)
                for x, a in zip(sums, awaited, strict=True)
            ]
            return tree.unflatten(values), []
        if not self.use_grad_mean:  # the mean, as many times as there were calls
            weight = weight / state.mini_step.astype(weight.dtype)
        count = len(sums)
        sums = [*sums, *(x.sum for x in extras)]
        if not sums:
            return tree.unflatten([]), []
        weights = [weight, *(x.weight for x in extras)]
        ways = [*awaited, *(x.awaited for x in extras)]
        values = means(sums, weights, range(len(sums)), ways, where)
        return tree.unflatten(values[:count]), values[count:]

    def _accumulator_of(self, dtype: Any) -> Any:
        if self.accumulator_dtype is None:
            return jnp.promote_types(dtype, jnp.float32)
        return narrow(dtype, self.accumulator_dtype)

    def _steps(self, gradient_step: jax.Array) -> Any:
        """Returns k, checked where it is known."""
        k = self.every_k(gradient_step)
        if not isinstance(k, jax.core.Tracer):
            check_steps(k, gradient_step)
        return k

    def _skip(self, updates: Any, gradient_step: Any, params: Any) -> tuple[jax.Array, Any]:
        assert self.should_skip is not None
        return check_skip(self.should_skip(updates, gradient_step, params))
