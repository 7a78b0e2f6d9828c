"""The training steps that absl_apps.bench compares with --problem=calls: a window of k calls.

The problem: residual MLPs of two D x 4D matrices, the loss a mean of squares, data parallel over
all axes of the mesh. Each step is (params, opt_state, microbatch) -> (params, opt_state, loss), the
update optax.adamw's in the k-th call. `in_calls` makes them all; they differ in the two lines of a
training step that `gradaccum.MultiSteps` changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import gradaccum
from absl_apps.bench_problem import OURS, Contender, Problem

LEARNING_RATE = 1e-3


class Calls(Problem):
    """The MLPs; k is the number of calls, B the rows of all k, D the width."""

    unit: ClassVar[str] = "window"

    @property
    def title(self) -> str:
        return (
            f"{2 * self.n_layer} matrices of {self.d_model} x {4 * self.d_model}, adamw, "
            f"{self.grad_acc_steps} calls of {self.batch_size // self.grad_acc_steps} rows, "
            f"{self.dtype}"
        )

    @property
    def params_shape(self) -> Any:
        """Of each MLP: [D, 4D] and [4D, D]."""
        shapes = (self.d_model, 4 * self.d_model), (4 * self.d_model, self.d_model)
        mlp = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=self.replicated) for x in shapes]
        return [mlp] * self.n_layer


def loss_fn(params: Any, microbatch: jax.Array) -> jax.Array:
    """Mean square of the output of the MLPs; microbatch [rows, D] -> []."""
    x = microbatch
    for w_in, w_out in params:
        x = x + jnp.dot(jax.nn.relu(jnp.dot(x, w_in)), w_out)
    return jnp.mean(x**2, dtype=jnp.float32)


########################################### The steps ############################################


def in_calls(
    problem: Problem,
    value_and_grad: Callable[..., Any],
    tx: Any,
    state_sharding: NamedSharding | None,
    mean: Callable[[Any], jax.Array] = lambda loss: loss,
    ours: bool = False,
) -> Contender:
    """k calls of one jitted training step, each with its rows split over the devices.

    The time is that of all k calls: the one that updates and those that only accumulate. The
    microbatches lie ready on the devices before the clock starts, as from a data loader. On
    simulated CPU devices each call is waited for, which costs k dispatches: with several in
    flight their all-reduces take each other's threads, and XLA gives up after 40 s.

    `state_sharding` None leaves the layout to `tx.init`; `mean` makes a number of a call's loss.
    """
    k = problem.grad_acc_steps
    one_at_a_time = problem.mesh.devices.flat[0].platform == "cpu"
    init = jax.jit(tx.init, out_shardings=state_sharding).lower(problem.params_shape).compile()
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(tx.init, problem.params_shape),
        init.output_shardings,
    )

    def call(params: Any, opt_state: Any, microbatch: jax.Array) -> tuple[Any, Any, Any]:
        loss, grads = value_and_grad(*problem.cast(params, microbatch))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def run(program: Any, params: Any, batches: Any) -> tuple[Any, list[Any]]:
        (opt_state, microbatches), losses = batches, []
        for microbatch in microbatches:
            params, opt_state, loss = program(params, opt_state, microbatch)
            losses.append(loss)
            if one_at_a_time:
                jax.block_until_ready((params, opt_state))
        return params, losses

    def prepare(params: Any, batch: jax.Array) -> Any:
        microbatches = [jax.device_put(x, problem.split) for x in jnp.split(batch, k)]
        return params, (init(params), microbatches)

    shards = [(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(state)]
    return Contender(
        jax.jit(
            call,
            out_shardings=(problem.replicated, init.output_shardings, None),
            donate_argnums=(0, 1) if problem.donate else (),
        ),
        (problem.params_shape, state, problem.batch_shape(problem.batch_size // k)),
        run=run,
        prepare=prepare,
        read_loss=lambda losses: sum(mean(loss) for loss in losses) / k,
        calls=k,
        state_bytes=sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards),
        ours=ours,
    )


def optax_multisteps(problem: Problem) -> Contender:
    """optax.MultiSteps: jit inserts the all-reduces, in every call; adamw runs in every call."""
    tx = optax.MultiSteps(optax.adamw(LEARNING_RATE), every_k_schedule=problem.grad_acc_steps)
    return in_calls(problem, jax.value_and_grad(loss_fn), tx, problem.replicated)


def gradaccum_multisteps(problem: Problem) -> Contender:
    """gradaccum.MultiSteps: the mean over devices and adamw in the call that updates.

    The loss stays on its devices too; whoever logs it pays for `gradaccum.mean`.
    """
    over = {"axis_name": problem.axes, "mesh": problem.mesh}
    wire = None if problem.dtype == jnp.float32 else problem.dtype  # None is the accumulator's
    value_and_grad = gradaccum.unreduced_value_and_grad(loss_fn, reduce_dtype=wire, **over)
    tx = gradaccum.MultiSteps(
        optax.adamw(LEARNING_RATE), every_k_schedule=problem.grad_acc_steps, **over
    )
    return in_calls(problem, value_and_grad, tx, None, mean=gradaccum.mean, ours=True)


def plain(problem: Problem) -> Contender:
    """gradaccum.MultiSteps with jit's gradients: an all-reduce in every call, adamw in the last."""
    tx = gradaccum.MultiSteps(optax.adamw(LEARNING_RATE), every_k_schedule=problem.grad_acc_steps)
    return in_calls(problem, jax.value_and_grad(loss_fn), tx, problem.replicated)


DEFAULT = ("optax", OURS)

CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    "optax": optax_multisteps,
    OURS: gradaccum_multisteps,
    "plain": plain,
}
