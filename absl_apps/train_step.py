"""The step of absl_apps.train: the loss decorated, the optimizer, and how everything lies."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from absl_apps import layers, meshes, transformer
from absl_apps.meshes import MODEL_AXIS
from absl_apps.train_state import TrainState, gradient_specs, state_specs


def make_step(
    config: transformer.Config,
    mesh: jax.sharding.Mesh,
    microbatches: int,
    tx: optax.GradientTransformation,
    sharding: str = "replicated",
    sequence_parallel: bool = False,
    hooked: TrainState | None = None,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]:
    """Return the jitted step (state, tokens [B, seq_len + 1]) -> (state, loss); donates state.

    Where `tx` takes the mean itself, by a communication hook, `hooked` is how the state lies.
    """
    param_specs, grad_specs = gradient_specs(sharding, config, mesh)
    where = hooked or jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), state_specs(sharding, config, tx, mesh)[0]
    )
    model = (
        layers.sharded(MODEL_AXIS, sequence_parallel) if MODEL_AXIS in mesh.shape else layers.PLAIN
    )

    # The batch is split over the data axes alone. That the specs name the model axis makes it
    # manual: the loss sees this device's shards, and communicates where its layers say.
    @gradaccum.accumulate(
        microbatches=microbatches,
        axis_name=meshes.data_axes(mesh),
        mesh=mesh,
        in_specs=(param_specs,),
        grad_specs=(grad_specs,),
    )
    def loss_fn(params: transformer.Params, tokens: jax.Array) -> jax.Array:
        return transformer.loss(params, tokens, config, model)

    # The state comes out as it went in: the next call of the compiled step takes it as it is.
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(where, NamedSharding(mesh, P())))
    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        if hooked:
            loss, grads = gradaccum.unreduced_value_and_grad(loss_fn)(state.params, tokens)
            loss = gradaccum.mean(loss)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        # With zero, the updates are what is gathered: then parameters are updated in place.
        updates = jax.lax.with_sharding_constraint(updates, where.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    return step
