"""The training steps that absl_apps.bench compares, on the first seed's problem.

The problem: layers of `x + x @ p` in a scan, the loss a mean, data parallel over all axes of the
mesh. Each step is (params, batch) -> (new params, loss), the gradient the mean over microbatches
and devices, the update optax.sgd's. Each is written as well as its idea allows.
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
from absl_apps import meshes

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
    donate: bool = False  # the parameters, to the step

    @property
    def axes(self) -> tuple[str, ...]:
        return self.mesh.axis_names

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    @property
    def split(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(self.axes))

    @property
    def params_shape(self) -> jax.ShapeDtypeStruct:
        shape = (self.n_layer, self.d_model, self.d_model)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.replicated)

    @property
    def params_split(self) -> P:
        return meshes.split_spec(self.params_shape.shape, self.mesh)

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


def apply_sgd(params: jax.Array, grads: jax.Array, sharding: NamedSharding) -> jax.Array:
    tx = optax.sgd(LEARNING_RATE)
    updates, _ = tx.update(grads, tx.init(params), params)
    # With ZeRO it is the updates that are gathered. Left to itself XLA gathers new parameters, and
    # then donated ones cannot be updated in place: 806 MB instead of 537 (full size, TPU v5e 2x4).
    updates = jax.lax.with_sharding_constraint(updates, sharding)
    return optax.apply_updates(params, updates)


########################################### The steps ############################################


class Contender(NamedTuple):
    """One way to write the step, before compilation.

    Attributes:
      jitted: the program to compile.
      shapes: its arguments, with shardings.
      gradients: of the same arguments, the step's loss and gradients alone, if it has them.
      run: (compiled program, params, batches) -> (new params, loss). This is what is timed.
      prepare: (params, batch) -> (params, batches) where the program wants them, not timed.
      calls: how often a step calls the program.
      state_bytes: bytes that each device holds from call to call besides the parameters.
      ours: it promises one cross-device mean.
    """

    jitted: Any
    shapes: tuple[Any, ...]
    gradients: Any = None
    run: Callable[[Any, jax.Array, Any], tuple[jax.Array, jax.Array]] = (
        lambda program, params, batch: program(params, batch)
    )
    prepare: Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]] = lambda *arrays: arrays
    calls: int = 1
    state_bytes: int = 0
    ours: bool = False


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

    def prepare(params: jax.Array, batch: jax.Array) -> Any:
        microbatches = [jax.device_put(x, problem.split) for x in jnp.split(batch, k)]
        return params, (jax.jit(init, out_shardings=problem.replicated)(), microbatches)

    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=problem.replicated),
        jax.eval_shape(init),
    )
    return Contender(
        jax.jit(
            call, out_shardings=problem.replicated, donate_argnums=(0, 1) if problem.donate else ()
        ),
        (problem.params_shape, state, problem.batch_shape(problem.batch_size // k)),
        run=run,
        prepare=prepare,
        calls=k,
        state_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
    )


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


OURS = "gradaccum"
DEFAULT = ("naive", "multisteps", "shard_map", OURS)

CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    "naive": naive,
    "multisteps": multisteps,
    "shard_map": shard_map,
    OURS: decorated,
    "gradaccum_by_value": lambda problem: decorated(problem, fused=False),
    "zero2": zero2,
    "fsdp": fsdp,
}
