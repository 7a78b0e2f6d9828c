"""The models that absl_apps.tensor_parallel compares, each one function of `Layers`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from absl_apps import haiku_model, transformer
from absl_apps.layers import Layers, sharded
from absl_apps.meshes import MODEL_AXIS


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes and dtype of the models; the vocabulary is that of bytes, the seed's and ours."""

    d_model: int
    n_layer: int
    n_head: int  # of the transformers
    seq_len: int
    dtype: str  # of parameters and computation


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model, whole or sharded.

    Attributes:
      init: key -> whole parameters, none of whose gradients is zero.
      loss: (parameters, tokens [b, seq_len + 1], layers) -> mean cross entropy.
      specs: how the parameters lie over the model axis.
      layers: the sharded layers; `absl_apps.layers.PLAIN` are the whole ones.
      check: devices along the model axis -> ValueError unless they divide the sizes.
      sequence_axis: the dimension along which activations are sharded between layers, if any.
      has_bias: whether a bias follows row-sharded weights.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, jax.Array, Layers], jax.Array]
    specs: Any
    layers: Layers
    check: Callable[[int], None]
    sequence_axis: int | None
    has_bias: bool


def haiku(sizes: Sizes) -> Model:
    """The second seed's model."""
    config = haiku_model.Config(d_model=sizes.d_model, n_layer=sizes.n_layer, dtype=sizes.dtype)
    return Model(
        init=lambda key: haiku_model.init(key, config),
        loss=lambda params, tokens, layers: haiku_model.loss(params, tokens, config, layers),
        specs=haiku_model.specs(config, MODEL_AXIS),
        layers=sharded(MODEL_AXIS),
        check=lambda shards: haiku_model.check_shards(config, shards, MODEL_AXIS),
        sequence_axis=None,
        has_bias=True,
    )


def of_transformer(sizes: Sizes, sequence_parallel: bool) -> Model:
    """The training program's transformer: heads, hidden features and vocabulary are sharded."""
    config = transformer.Config(sizes.d_model, sizes.n_layer, sizes.n_head, sizes.dtype)

    def init(key: jax.Array) -> Any:
        body, head = jax.random.split(key)
        params = transformer.init(body, config)
        # The program's head starts at zero, and then only the head has a gradient.
        params["head"] = jax.random.normal(head, params["head"].shape) / math.sqrt(config.d_model)
        return jax.tree.map(lambda x: x.astype(jnp.dtype(sizes.dtype)), params)

    def check(shards: int) -> None:
        transformer.check_shards(config, shards, MODEL_AXIS)
        if sequence_parallel and sizes.seq_len % shards:
            longer = -(-sizes.seq_len // shards) * shards
            raise ValueError(
                f"sequence_parallel: seq_len = {sizes.seq_len} is not divisible by the {shards} "
                f"devices along {MODEL_AXIS}; take {longer}."
            )

    return Model(
        init=init,
        loss=lambda params, tokens, layers: transformer.loss(params, tokens, config, layers),
        specs=transformer.specs(MODEL_AXIS),
        layers=sharded(MODEL_AXIS, sequence_parallel),
        check=check,
        sequence_axis=1 if sequence_parallel else None,
        has_bias=False,
    )


MODELS: dict[str, Callable[[Sizes], Model]] = {
    "haiku": haiku,
    "transformer": lambda sizes: of_transformer(sizes, sequence_parallel=False),
    "sequence_parallel": lambda sizes: of_transformer(sizes, sequence_parallel=True),
}


def tokens(seed: int, batch_size: int, sizes: Sizes) -> np.ndarray:
    """Return random bytes `[batch_size, seq_len + 1]`: inputs, and targets one byte later."""
    rng = np.random.default_rng(seed)
    shape = (batch_size, sizes.seq_len + 1)
    return rng.integers(0, transformer.VOCABULARY, shape, dtype=np.uint8)
