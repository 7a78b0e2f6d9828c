"""The compiled functions of absl_apps.train: one call of a step, and the loss of held-out data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from optax.microbatching import AccumulationType

import gradaccum
from absl_apps import transformer
from absl_apps.train_setup import Setup
from absl_apps.train_state import TrainState

Batch = dict[str, Any]  # "tokens" [B, t + 1]; "mask" bool [B, t], which targets count
Measured = dict[str, jax.Array]


def make_step(
    setup: Setup, microbatches: int, state: TrainState
) -> Callable[[TrainState, Batch, ArrayLike], tuple[TrainState, Measured]]:
    """Return the jitted (state, batch, call) -> (state, measured); it donates the state.

    Measured are, float32 `[]`, the `loss`, a mean over all targets of the step, and the
    `gradient_norm`, of the mean before it is clipped. Where one is not finite, all of the state but
    its window is bitwise what it was. Where a step is several calls, the last one measures.

    Args:
      setup: what the step is made of.
      microbatches: of one call on each device.
      state: how the state lies, of `describe_state`: it comes out as it went in.
    """
    where = jax.tree.map(lambda x: x.sharding, state)
    loss_fn = _decorated(setup, microbatches)
    gradients = gradaccum.unreduced_value_and_grad if setup.unreduced else jax.value_and_grad
    update = _update_window if setup.every_k > 1 else _update

    whole = NamedSharding(setup.mesh, P())

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(where, whole))
    def step(state: TrainState, batch: Batch, call: jax.Array) -> tuple[TrainState, Measured]:
        keys = () if state.key is None else (jax.random.fold_in(state.key, call),)
        loss, grads = gradients(loss_fn)(state.params, batch, *keys)
        return update(setup, state, loss, grads)

    return step


def _decorated(setup: Setup, microbatches: int) -> Any:
    """Returns (params, batch, key where there is dropout) -> the mean loss of the batch's targets.

    The batch is split over the data axes alone. That the specs name the model axis makes it manual:
    the loss sees this device's shards, and communicates where its layers say.
    """

    def loss_fn(params: Any, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        config, layers = setup.config, setup.layers
        return transformer.loss(params, batch["tokens"], config, layers, key, batch["mask"])

    return gradaccum.accumulate(
        loss_fn,
        microbatches=microbatches,
        axis_name=setup.data_axes,
        mesh=setup.mesh,
        weight_fn=lambda batch: jnp.sum(batch["mask"]),
        key_argnums=(2,) if setup.config.dropout else (),
        in_specs=(setup.specs(3),),
        grad_specs=(setup.specs(2),),
        reduce_dtype=setup.reduce_dtype,
    )


def _update(setup: Setup, state: TrainState, loss: Any, grads: Any) -> tuple[TrainState, Measured]:
    """A step that is one call."""
    comm_state = state.comm_state
    if setup.comm_hook is not None:
        loss = gradaccum.mean(loss)
        grads, comm_state = setup.hook_mean().update(grads, comm_state)
    norm = optax.tree.norm(grads)
    updates, opt_state = setup.optimizer().update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new = state._replace(params=params, opt_state=opt_state, comm_state=comm_state)
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, state)
    return kept, {"loss": loss, "gradient_norm": norm}


def _update_window(
    setup: Setup, state: TrainState, loss: Any, grads: Any
) -> tuple[TrainState, Measured]:
    """One of the calls that make a step."""
    loss, window = setup.loss_window().update(loss, state.window)
    tx = setup.window(lambda norm: ~(jnp.isfinite(loss) & jnp.isfinite(norm)))
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norm = opt_state.skip_state["gradient_norm"]
    state = state._replace(params=params, opt_state=opt_state, window=window)
    return state, {"loss": loss, "gradient_norm": norm}


def make_evaluation(
    setup: Setup, microbatches: int
) -> Callable[[transformer.Params, Batch], tuple[jax.Array, jax.Array]]:
    """Return the jitted (params, batch) -> (sum of losses float32, number of targets int32)."""

    @functools.partial(
        gradaccum.accumulate,
        microbatches=microbatches,
        axis_name=setup.data_axes,
        mesh=setup.mesh,
        loss_reduction="sum",
        has_aux=True,
        aux_accumulator=AccumulationType.SUM,
        in_specs=(setup.specs(3),),
    )
    def total(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        losses = transformer.losses(params, batch["tokens"], setup.config, setup.layers)
        return jnp.sum(losses, where=batch["mask"]), jnp.sum(batch["mask"])

    return jax.jit(total)
