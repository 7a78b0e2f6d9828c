"""The second seed's model, in Haiku: an embedding, residual feed-forward layers, a projection.

Written over `Layers`, so it runs whole, or inside a `shard_map` with its hidden features and its
vocabulary sharded over a model axis, by `specs`. Parameters are initialised whole, so they do not
depend on the number of devices. The seed makes its biases zero, which hides a bias that every
device adds; here they are not.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from absl_apps.layers import PLAIN, Layers


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; the seed's by default."""

    vocabulary: int = 256
    d_model: int = 128
    n_layer: int = 2
    dtype: str = "float32"  # of parameters and computation

    def __post_init__(self) -> None:
        if min(self.vocabulary, self.d_model, self.n_layer) < 1:
            raise ValueError(f"haiku_model: every size must be at least 1, got {self}")


class Embedding(hk.Module):
    def __init__(self, config: Config, layers: Layers):
        super().__init__()
        self.config, self.layers = config, layers

    def __call__(self, ids: jax.Array) -> jax.Array:
        c = self.config
        shape = (c.vocabulary // self.layers.shards, c.d_model)
        return self.layers.embedding(_weight("table", shape, c, 1), ids)


class FeedForward(hk.Module):
    def __init__(self, config: Config, layers: Layers):
        super().__init__()
        self.config, self.layers = config, layers

    def __call__(self, x: jax.Array) -> jax.Array:
        c, d = self.config, self.config.d_model
        hidden = 4 * d // self.layers.shards
        up, up_bias = _weight("up", (d, hidden), c, d), _bias("up_bias", hidden, c)
        down, down_bias = _weight("down", (hidden, d), c, 4 * d), _bias("down_bias", d, c)
        h = jax.nn.gelu(self.layers.column_dense(x, up, up_bias))
        return self.layers.row_dense(h, down, down_bias)


class Projection(hk.Module):
    def __init__(self, config: Config, layers: Layers):
        super().__init__()
        self.config, self.layers = config, layers

    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        columns = c.vocabulary // self.layers.shards
        w, b = _weight("w", (c.d_model, columns), c, c.d_model), _bias("b", columns, c)
        return self.layers.column_dense(x, w, b)


def _weight(name: str, shape: tuple[int, ...], config: Config, fan_in: int) -> jax.Array:
    init = hk.initializers.RandomNormal(fan_in**-0.5)
    return hk.get_parameter(name, shape, jnp.dtype(config.dtype), init)


def _bias(name: str, size: int, config: Config) -> jax.Array:
    init = hk.initializers.RandomNormal(0.1)
    return hk.get_parameter(name, (size,), jnp.dtype(config.dtype), init)


def _transformed(config: Config, layers: Layers) -> hk.Transformed:
    check_shards(config, layers.shards, layers.axis_name)

    def forward(ids: ArrayLike, targets: ArrayLike) -> jax.Array:
        x = Embedding(config, layers)(jnp.asarray(ids))
        for _ in range(config.n_layer):
            x += FeedForward(config, layers)(x)
        logits = Projection(config, layers)(x)
        return jnp.mean(layers.cross_entropy(logits, jnp.asarray(targets)))

    return hk.without_apply_rng(hk.transform(forward))


def check_shards(config: Config, shards: int, axis: str | None) -> None:
    """Raise ValueError unless the devices along a model axis get equal rows and columns."""
    problems = []
    if (hidden := 4 * config.d_model) % shards:
        wider = next(d for d in itertools.count(config.d_model) if 4 * d % shards == 0)
        problems.append(
            f"4 * d_model = 4 * {config.d_model} = {hidden} hidden features: take d_model = {wider}"
        )
    if config.vocabulary % shards:
        padded = -(-config.vocabulary // shards) * shards
        problems.append(f"vocabulary = {config.vocabulary}: pad it to {padded}")
    if problems:
        raise ValueError(
            f"haiku_model: not divisible by the {shards} devices along {axis}: "
            f"{'; '.join(problems)}."
        )


def init(key: jax.Array, config: Config) -> Any:
    """Return whole parameters; place them by `specs`."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return _transformed(config, PLAIN).init(key, ids, ids)


def loss(params: Any, tokens: ArrayLike, config: Config, layers: Layers = PLAIN) -> jax.Array:
    """Return the mean cross entropy, in nats, of predicting `tokens[:, 1:]` `[b, t]`.

    With sharded layers, parameters are this device's shards.

    Raises:
      ValueError: the devices along the model axis do not divide a size.
    """
    tokens = jnp.asarray(tokens)
    return _transformed(config, layers).apply(params, tokens[:, :-1], tokens[:, 1:])


def specs(config: Config, axis: str | None) -> dict[str, dict[str, P]]:
    """Return how parameters lie over a model axis: what `in_specs` of a `shard_map` is to be."""
    feed_forward = {"up": P(None, axis), "up_bias": P(axis), "down": P(axis), "down_bias": P()}
    names = ["feed_forward", *(f"feed_forward_{i}" for i in range(1, config.n_layer))]
    return {
        "embedding": {"table": P(axis)},
        **dict.fromkeys(names, feed_forward),
        "projection": {"w": P(None, axis), "b": P(axis)},
    }
