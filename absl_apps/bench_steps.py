"""The training steps that absl_apps.bench compares, on the first seed's problem.

The problem: layers of `x + x @ p` in a scan, the loss a mean, data parallel over one axis. Each
step is (params, batch) -> (new params, loss), the gradient the mean over microbatches and devices,
the update optax.sgd's. Nothing is donated. Each is written as well as its idea allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum

AXIS = "dp"
LEARNING_RATE = 1.0  # moves the parameters far enough for a comparison of them to mean something


########################################## The problem ###########################################


@dataclasses.dataclass(frozen=True)
class Problem:
    """The first seed's problem on a mesh; the names of its sizes are the seed's flags."""

    mesh: Mesh
    grad_acc_steps: int  # k
    batch_size: int  # B
    d_model: int  # D
    n_layer: int  # L
    dtype: Any  # of parameters and batch in the loss, so of gradients, accumulator and wire

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    @property
    def split(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(AXIS))

    @property
    def params_shape(self) -> jax.ShapeDtypeStruct:
        shape = (self.n_layer, self.d_model, self.d_model)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.replicated)

    def batch_shape(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.d_model), jnp.float32, sharding=self.split)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient tree, on each device."""
        return self.n_layer * self.d_model**2 * jnp.dtype(self.dtype).itemsize

    def arrays(self, seed: int) -> tuple[jax.Array, jax.Array]:
        """Draw params [L, D, D] and batch [B, D], in place on the mesh.

        The seed's batch is all ones; these rows differ, or a step that lost some would go
        unnoticed. Weights are of order 1/sqrt(D), so that activations stay in range.
        """

        def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            for_params, for_batch = jax.random.split(key)
            params = jax.random.normal(for_params, self.params_shape.shape) / self.d_model**0.5
            batch = 1 + jax.random.normal(for_batch, (self.batch_size, self.d_model))
            return params, batch

        # Drawn on each device: the same bits, and no program moves them about.
        draw = jax.jit(draw, out_shardings=(self.replicated, self.split))
        return draw(jax.random.key(seed))

    def cast(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The seed's `to_bf16`, before the loop, so that gradients have this dtype too.

        Given a float32 batch, as in the seed, each layer's gradient is a float32 product that XLA
        reduces before it rounds: twice the bytes. So the steps cast the batch as well.
        """
        return tuple(x.astype(self.dtype) for x in arrays)


def loss_fn(params: jax.Array, batch: jax.Array) -> jax.Array:
    """Mean of the output of L residual layers; params [L, D, D], batch [rows, D] -> []."""

    def layer(x: jax.Array, p: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.dot(x, p), None

    return jnp.mean(jax.lax.scan(layer, batch, params)[0], dtype=jnp.float32)


def apply_sgd(params: jax.Array, grads: jax.Array) -> jax.Array:
    tx = optax.sgd(LEARNING_RATE)
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


########################################### The steps ############################################


class Contender(NamedTuple):
    """One way to write the step, before compilation.

    Attributes:
      jitted: the program to compile.
      shapes: its arguments, with shardings.
      run: (compiled program, params, batches) -> (new params, loss). This is what is timed.
      prepare: batch -> batches, not timed.
      calls: how often a step calls the program.
      state_bytes: bytes that each device holds from call to call besides the parameters.
    """

    jitted: Any
    shapes: tuple[Any, ...]
    run: Callable[[Any, jax.Array, Any], tuple[jax.Array, jax.Array]] = (
        lambda program, params, batch: program(params, batch)
    )
    prepare: Callable[[jax.Array], Any] = lambda batch: batch
    calls: int = 1
    state_bytes: int = 0


def _whole_step(problem: Problem, step: Callable[..., Any]) -> Contender:
    jitted = jax.jit(step, out_shardings=problem.replicated)
    return Contender(jitted, (problem.params_shape, problem.batch_shape(problem.batch_size)))


def naive(problem: Problem) -> Contender:
    """The first seed's: a scan of value_and_grad under jit, the microbatches constrained."""
    k = problem.grad_acc_steps

    def step(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        cast, batch = problem.cast(params, batch)
        batch = batch.reshape(k, -1, problem.d_model)
        sharding = NamedSharding(problem.mesh, P(None, AXIS))
        batch = jax.lax.with_sharding_constraint(batch, sharding)

        def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
            new = jax.value_and_grad(loss_fn)(cast, microbatch)
            return jax.tree.map(jnp.add, total, new), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, cast))
        loss, grads = jax.tree.map(lambda x: x / k, jax.lax.scan(add, zeros, batch)[0])
        return apply_sgd(params, grads), loss

    return _whole_step(problem, step)


def shard_map(problem: Problem) -> Contender:
    """The hand-written loop: each device adds up its own gradients, then one pmean."""
    k = problem.grad_acc_steps

    def local(params: jax.Array, batch: jax.Array) -> Any:
        def add(total: Any, microbatch: jax.Array) -> tuple[Any, None]:
            new = jax.value_and_grad(loss_fn)(params, microbatch)
            return jax.tree.map(jnp.add, total, new), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zeros, batch.reshape(k, -1, problem.d_model))
        return jax.tree.map(lambda x: x / k, jax.lax.pmean(total, AXIS))

    def step(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        fun = jax.shard_map(
            local, mesh=problem.mesh, in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False
        )
        loss, grads = fun(*problem.cast(params, batch))
        return apply_sgd(params, grads), loss

    return _whole_step(problem, step)


def multisteps(problem: Problem) -> Contender:
    """optax.MultiSteps: k calls of one jitted microbatch step, the batch sharded.

    The time is that of all k calls: the one that updates and those that only accumulate. The
    microbatches lie ready on the devices before the clock starts, as from a data loader. On
    simulated CPU devices each call is waited for, which costs k dispatches: with several in
    flight their all-reduces take each other's threads, and XLA gives up after 40 s.
    """
    k = problem.grad_acc_steps
    one_at_a_time = problem.mesh.devices.flat[0].platform == "cpu"
    tx = optax.MultiSteps(optax.sgd(LEARNING_RATE), every_k_schedule=k)

    def init() -> tuple[Any, jax.Array]:
        return tx.init(jnp.zeros(problem.params_shape.shape)), jnp.zeros(())

    def call(params: jax.Array, state: Any, microbatch: jax.Array) -> tuple[jax.Array, Any]:
        opt_state, total = state
        loss, grads = jax.value_and_grad(loss_fn)(*problem.cast(params, microbatch))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), (opt_state, total + loss / k)

    def run(program: Any, params: jax.Array, batches: Any) -> tuple[jax.Array, jax.Array]:
        state, microbatches = batches
        for microbatch in microbatches:
            params, state = program(params, state, microbatch)
            if one_at_a_time:
                jax.block_until_ready(state)
        return params, state[1]

    def prepare(batch: jax.Array) -> Any:
        microbatches = [jax.device_put(x, problem.split) for x in jnp.split(batch, k)]
        return jax.jit(init, out_shardings=problem.replicated)(), microbatches

    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=problem.replicated),
        jax.eval_shape(init),
    )
    return Contender(
        jax.jit(call, out_shardings=problem.replicated),
        (problem.params_shape, state, problem.batch_shape(problem.batch_size // k)),
        run=run,
        prepare=prepare,
        calls=k,
        state_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
    )


def decorated(problem: Problem, *, fused: bool = True) -> Contender:
    """gradaccum: the loss decorated, the step as without accumulation."""
    accumulated = gradaccum.accumulate(
        loss_fn,
        microbatches=problem.grad_acc_steps,
        axis_name=AXIS,
        mesh=problem.mesh,
        accumulator_dtype=problem.dtype,  # as the others, for like to be compared with like
        fused=fused,
    )

    def step(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(accumulated)(*problem.cast(params, batch))
        return apply_sgd(params, grads), loss

    return _whole_step(problem, step)


OURS = "gradaccum"

CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    "naive": naive,
    "multisteps": multisteps,
    "shard_map": shard_map,
    OURS: decorated,
    "gradaccum_by_value": lambda problem: decorated(problem, fused=False),
}
