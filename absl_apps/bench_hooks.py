"""gradaccum's step with a communication hook, for absl_apps.bench --problem=steps.

The gradients wait for their mean, which `gradaccum.all_reduce_mean(..., comm_hook=hook)` takes; the
hook's state is an argument and a result of the step. Hooks have their default options.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import optax

import gradaccum
from absl_apps.bench_problem import Contender, Problem
from absl_apps.bench_steps import apply_sgd, loss_fn
from gradaccum import hooks

# What a compression may take from the update. That of noop is one device's own: not compared. The
# gradient of these layers has rank 1, so that PowerSGD's error here says nothing of others.
HOOKS = {
    "allreduce": (hooks.allreduce(), None),
    "bf16_compress": (hooks.bf16_compress(), 1e-2),
    "fp16_compress": (hooks.fp16_compress(), 2e-3),
    "int8_quantize": (hooks.int8_quantize(), 2e-2),
    "powersgd": (hooks.powersgd(), 1e-4),
    "noop": (hooks.noop(), math.inf),
}


def hooked(problem: Problem, hook: Any, tolerance: float | None) -> Contender:
    """The step whose mean the hook takes; each time with the hook's first state."""
    value_and_grad = gradaccum.unreduced_value_and_grad(
        loss_fn,
        microbatches=problem.grad_acc_steps,
        axis_name=problem.axes,
        mesh=problem.mesh,
        accumulator_dtype=problem.dtype,
    )
    mean = gradaccum.all_reduce_mean(problem.axes, mesh=problem.mesh, comm_hook=hook)

    def init(params: jax.Array) -> optax.OptState:
        return mean.init(*problem.cast(params))

    def lie(node: Any) -> Any:
        """Of a residual each device has a row; all else is on all of them."""
        where = problem.split if isinstance(node, hooks.Residual) else problem.replicated
        return jax.tree.map(lambda x: where, node)

    shapes = jax.eval_shape(init, problem.params_shape)
    where = jax.tree.map(lie, shapes, is_leaf=lambda x: isinstance(x, hooks.Residual))
    state = jax.tree.map(
        lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes, where
    )

    def gradients(params: jax.Array, state: Any, batch: jax.Array) -> Any:
        loss, grads = value_and_grad(*problem.cast(params, batch))
        return gradaccum.mean(loss), *mean.update(grads, state)

    def step(params: jax.Array, state: Any, batch: jax.Array) -> Any:
        loss, grads, state = gradients(params, state, batch)
        return apply_sgd(params, grads, problem.replicated), state, loss

    def run(program: Any, params: jax.Array, batches: Any) -> tuple[jax.Array, jax.Array]:
        params, _, loss = program(params, *batches)
        return params, loss

    def prepare(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, Any]:
        return params, (jax.jit(init, out_shardings=where)(params), batch)

    held = [(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(state)]
    results = problem.replicated, where, problem.replicated
    return Contender(
        jax.jit(step, out_shardings=results, donate_argnums=(0, 1) if problem.donate else ()),
        (problem.params_shape, state, problem.batch_shape(problem.batch_size)),
        gradients=jax.jit(gradients),
        run=run,
        prepare=prepare,
        state_bytes=sum(math.prod(shape) * dtype.itemsize for shape, dtype in held),
        ours=not isinstance(hook, hooks.noop),
        tolerance=tolerance,
    )


CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    name: functools.partial(hooked, hook=hook, tolerance=tolerance)
    for name, (hook, tolerance) in HOOKS.items()
}
