"""The training steps that absl_apps.bench compares with --problem=steps, the first seed's.

The problem: layers of `x + x @ p` in a scan, the loss a mean, data parallel over all axes of the
mesh. Each step is (params, batch) -> (new params, loss), the gradient the mean over microbatches
and devices, the update optax.sgd's. Each is written as well as its idea allows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.microbatching import AccumulationType, microbatch

import gradaccum
from absl_apps.bench_calls import in_calls
from absl_apps.bench_problem import OURS, Contender, Problem

LEARNING_RATE = 1.0  # moves the parameters far enough for a comparison of them to mean something


########################################## The problem ###########################################


def loss_fn(params: jax.Array, batch: jax.Array) -> jax.Array:
    """Mean of the output of L residual layers; params [L, D, D], batch [rows, D] -> []."""

    def layer(x: jax.Array, p: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.dot(x, p), None

    return jnp.mean(jax.lax.scan(layer, batch, params)[0], dtype=jnp.float32)


def apply_sgd(params: jax.Array, grads: jax.Array, sharding: NamedSharding) -> jax.Array:
    tx = optax.sgd(LEARNING_RATE)
    updates, _ = tx.update(grads, tx.init(params), params)
    # With ZeRO it is the updates that are gathered. Left to itself XLA gathers new parameters, and
    # then donated ones cannot be updated in place: 806 MB instead of 537 (full size, TPU v5e 2x4).
    updates = jax.lax.with_sharding_constraint(updates, sharding)
    return optax.apply_updates(params, updates)


########################################### The steps ############################################


def _whole_step(
    problem: Problem, value_and_grad: Callable[..., Any], params_spec: P | None = None
) -> Contender:
    """The step that applies (cast params, cast batch) -> (loss, grads); parameters replicated."""
    where = NamedSharding(problem.mesh, params_spec or P())

    def gradients(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return value_and_grad(*problem.cast(params, batch))

    def step(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grads = gradients(params, batch)
        return apply_sgd(params, grads, where), loss

    donated = 0 if problem.donate else ()
    params = jax.ShapeDtypeStruct(problem.params_shape.shape, jnp.float32, sharding=where)
    return Contender(
        jax.jit(step, out_shardings=(where, problem.replicated), donate_argnums=donated),
        (params, problem.batch_shape(problem.batch_size)),
        gradients=jax.jit(gradients),
        prepare=lambda params, batch: (jax.device_put(params, where), batch),
    )


def naive(problem: Problem) -> Contender:
    """The first seed's: a scan of value_and_grad under jit, the microbatches constrained."""
    k = problem.grad_acc_steps

    def value_and_grad(params: jax.Array, batch: jax.Array) -> Any:
        batch = batch.reshape(k, -1, problem.d_model)
        sharding = NamedSharding(problem.mesh, P(None, problem.axes))
        batch = jax.lax.with_sharding_constraint(batch, sharding)

        def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
            new = jax.value_and_grad(loss_fn)(params, microbatch)
            return jax.tree.map(jnp.add, total, new), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return jax.tree.map(lambda x: x / k, jax.lax.scan(add, zeros, batch)[0])

    return _whole_step(problem, value_and_grad)


def shard_map(problem: Problem) -> Contender:
    """The hand-written loop: each device adds up its own gradients, then one pmean."""
    k = problem.grad_acc_steps

    def local(params: jax.Array, batch: jax.Array) -> Any:
        def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
            new = jax.value_and_grad(loss_fn)(params, microbatch)
            return jax.tree.map(jnp.add, total, new), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zeros, batch.reshape(k, -1, problem.d_model))
        return jax.tree.map(lambda x: x / k, jax.lax.pmean(total, problem.axes))

    in_specs = (P(), P(problem.axes))
    value_and_grad = jax.shard_map(
        local, mesh=problem.mesh, in_specs=in_specs, out_specs=P(), check_vma=False
    )
    return _whole_step(problem, value_and_grad)


def reduced(problem: Problem) -> Contender:
    """JAX's own recipe on Explicit axes: parameters `reduced`, so gradients `unreduced`.

    The scalar loss is reduced in every microbatch: only products have an unreduced result.
    """
    axis_types = (AxisType.Explicit,) * len(problem.axes)
    mesh = jax.sharding.Mesh(problem.mesh.devices, problem.axes, axis_types=axis_types)
    problem = dataclasses.replace(problem, mesh=mesh)
    k, n, axes = problem.grad_acc_steps, mesh.size, set(problem.axes)

    def where(*spec: Any, **kinds: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*spec, **kinds))

    def value_and_grad(params: jax.Array, batch: jax.Array) -> Any:
        params = jax.reshard(params, where(reduced=axes))
        # Each device's own rows in k parts: no row travels.
        batch = batch.reshape(n, k, -1, problem.d_model, out_sharding=where(problem.axes))
        batch = batch.swapaxes(0, 1)
        batch = batch.reshape(k, -1, problem.d_model, out_sharding=where(None, problem.axes))

        def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
            new = jax.value_and_grad(loss_fn)(params, microbatch)
            return jax.tree.map(jnp.add, total, new), None

        grads = jax.reshard(jnp.zeros(params.shape, params.dtype), where(unreduced=axes))
        (loss, grads), _ = jax.lax.scan(add, (jnp.zeros(()), grads), batch)
        return loss / k, jax.reshard(grads, where()) / k

    contender = _whole_step(problem, value_and_grad)
    return contender._replace(
        prepare=lambda *arrays: (
            jax.device_put(arrays[0], problem.replicated),
            jax.device_put(arrays[1], problem.split),
        )
    )


def microbatching(problem: Problem) -> Contender:
    """optax.microbatching.microbatch of value_and_grad, under jit."""
    return _whole_step(
        problem,
        microbatch(
            jax.value_and_grad(loss_fn),
            argnums=1,
            microbatch_size=problem.batch_size // problem.grad_acc_steps,
            accumulator=AccumulationType.MEAN,
        ),
    )


def limit(problem: Problem) -> Contender:
    """k gradients on each device, of which the last is kept: neither summed nor reduced.

    What a step takes at least, then. Only the loss is a mean.
    """

    k = problem.grad_acc_steps

    def local(params: jax.Array, batch: jax.Array) -> Any:
        def replace(carry: Any, microbatch: jax.Array) -> tuple[Any, None]:
            loss, grads = jax.value_and_grad(loss_fn)(params, microbatch)
            return (carry[0] + loss, grads), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        loss, grads = jax.lax.scan(replace, zeros, batch.reshape(k, -1, problem.d_model))[0]
        return jax.lax.pmean(loss / k, problem.axes), grads

    value_and_grad = jax.shard_map(
        local,
        mesh=problem.mesh,
        in_specs=(P(), P(problem.axes)),
        out_specs=P(),
        check_vma=False,
    )
    return _whole_step(problem, value_and_grad)._replace(tolerance=math.inf)


def multisteps(problem: Problem) -> Contender:
    """optax.MultiSteps: k calls of one jitted microbatch step, the batch sharded."""
    tx = optax.MultiSteps(optax.sgd(LEARNING_RATE), every_k_schedule=problem.grad_acc_steps)
    return in_calls(problem, jax.value_and_grad(loss_fn), tx, problem.replicated)


def decorated(problem: Problem, params_spec: P | None = None, **options: Any) -> Contender:
    """gradaccum: the loss decorated, the step as without accumulation."""
    accumulated = gradaccum.accumulate(
        loss_fn,
        microbatches=problem.grad_acc_steps,
        axis_name=problem.axes,
        mesh=problem.mesh,
        accumulator_dtype=problem.dtype,  # as the others, for like to be compared with like
        **options,
    )
    contender = _whole_step(problem, jax.value_and_grad(accumulated), params_spec)
    return contender._replace(ours=True)


def zero2(problem: Problem) -> Contender:
    """gradaccum's ZeRO-2: parameters replicated, gradients split, updates gathered."""
    return decorated(problem, grad_specs=(problem.params_split,))


def fsdp(problem: Problem) -> Contender:
    """gradaccum's FSDP: parameters and gradients split; over slices, within each: HSDP."""
    return decorated(problem, problem.params_split, in_specs=(problem.params_split,))


DEFAULT = ("naive", "multisteps", "microbatching", "reduced", "shard_map", "limit", OURS)

CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    "naive": naive,
    "multisteps": multisteps,
    "microbatching": microbatching,
    "reduced": reduced,
    "shard_map": shard_map,
    "limit": limit,
    OURS: decorated,
    "gradaccum_by_value": lambda problem: decorated(problem, fused=False),
    "zero2": zero2,
    "fsdp": fsdp,
}
