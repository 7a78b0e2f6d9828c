"""What absl_apps.train carries from step to step, and how it lies on the mesh."""

from __future__ import annotations

from typing import NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from absl_apps import meshes, transformer
from absl_apps.meshes import MODEL_AXIS


class TrainState(NamedTuple):
    params: transformer.Params  # float32
    opt_state: optax.OptState


def init_state(
    key: jax.Array, config: transformer.Config, tx: optax.GradientTransformation
) -> TrainState:
    params = transformer.init(key, config)
    return TrainState(params, tx.init(params))


def gradient_specs(
    sharding: str, config: transformer.Config, mesh: jax.sharding.Mesh
) -> tuple[transformer.Params, transformer.Params]:
    """Return how the parameters lie on the mesh, and how their gradients do."""
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    model = transformer.specs(MODEL_AXIS if MODEL_AXIS in mesh.shape else None)
    split = jax.tree.map(lambda x, spec: meshes.split_spec(x.shape, mesh, spec), shapes, model)
    return split if sharding == "fsdp" else model, model if sharding == "replicated" else split


def state_specs(
    sharding: str,
    config: transformer.Config,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> tuple[TrainState, transformer.Params]:
    """Return how the state lies on the mesh, and how the gradients do."""
    shapes = jax.eval_shape(lambda: init_state(jax.random.key(0), config, tx))
    params, grads = gradient_specs(sharding, config, mesh)
    # Moments lie as the gradients that they are made of; counts of steps are whole.
    opt_state = optax.tree_map_params(
        tx, lambda _, spec: spec, shapes.opt_state, grads, transform_non_params=lambda _: P()
    )
    return TrainState(params, opt_state), grads
