"""A decoder-only transformer in plain JAX: parameters are a dict, the model is a function.

The layers are stacked along a leading axis and run in one `jax.lax.scan`, so program size does not
grow with depth; `remat` says which activations are kept, at least each layer's input. Parameters
are float32 and are cast to the compute dtype *inside* the layer: the stack then reaches the scan as
it is stored, which is what lets `gradaccum.accumulate` add its gradients in place.

Written over `Layers`, so that it runs whole, or inside a `shard_map` with its heads, its hidden
features and its vocabulary sharded over a model axis, by `specs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from absl_apps.layers import PLAIN, Layers

VOCABULARY = 256  # bytes

# Vocabularies that are no multiple of it get rows and columns more, which no target names: so any
# number of devices up to it divides them, and parameters do not depend on that number.
_PAD_TO = 128

# What the backward pass recomputes: all of a layer, all but its matrix products, or nothing.
REMAT = ("layer", "dots", "none")

Params = dict[str, "jax.Array | Params"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a transformer; `d_model` is a multiple of `2 * n_head` (rotary pairs).

    Attributes:
      dropout: probability of dropping an element of what attention and MLP add to the residual
        stream, in training.
      remat: of REMAT.
    """

    d_model: int
    n_layer: int
    n_head: int
    compute_dtype: str = "bfloat16"
    vocab_size: int = VOCABULARY
    dropout: float = 0.0
    remat: str = REMAT[0]

    @property
    def padded_vocab_size(self) -> int:
        """The rows of the embedding, and the columns of the head."""
        return -(-self.vocab_size // _PAD_TO) * _PAD_TO

    def __post_init__(self) -> None:
        if min(self.d_model, self.n_layer, self.n_head, self.vocab_size) < 1:
            raise ValueError(f"transformer: every size must be at least 1, got {self}")
        if self.d_model % (2 * self.n_head):
            raise ValueError(
                f"transformer: d_model = {self.d_model} is not divisible by 2 * n_head = "
                f"2 * {self.n_head} = {2 * self.n_head} (each head needs an even width, which "
                "rotary positions pair up)."
            )


def init(key: jax.Array, config: Config) -> Params:
    """Return float32 parameters; the leaves under `"layers"` are `[n_layer, ...]`.

    The output head starts at zero, so the first loss is log(vocab_size) nats whatever the sizes.
    """
    D, L, V = config.d_model, config.n_layer, config.padded_vocab_size
    embed, qkv, proj, up, down = jax.random.split(key, 5)

    def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5

    return {
        "embed": normal(embed, (V, D), 1),
        "layers": {
            "attention_scale": jnp.ones((L, D)),
            # Columns by head, then q, k, v: a part of them is whole heads, for any number of parts.
            "qkv": normal(qkv, (L, D, 3 * D), D),
            # 2 L branches add into the residual stream: keep their sum of order one.
            "proj": normal(proj, (L, D, D), 2 * L * D),
            "mlp_scale": jnp.ones((L, D)),
            "up": normal(up, (L, D, 4 * D), D),
            "down": normal(down, (L, 4 * D, D), 2 * L * 4 * D),
        },
        "final_scale": jnp.ones((D,)),
        "head": jnp.zeros((D, V)),
    }


def specs(axis: str | None) -> Params:
    """Return how parameters lie over a model axis: what `in_specs` of a `shard_map` is to be.

    Without one, `axis=None`, every leaf is whole.
    """

    def split(*dims: str | None) -> P:
        return P(*dims) if axis else P()

    whole, columns, rows = P(), split(None, None, axis), split(None, axis)
    return {
        "embed": split(axis),
        "layers": {
            "attention_scale": whole,
            "qkv": columns,
            "proj": rows,
            "mlp_scale": whole,
            "up": columns,
            "down": rows,
        },
        "final_scale": whole,
        "head": split(None, axis),
    }


def check_shards(config: Config, shards: int, axis: str) -> None:
    """Raise ValueError unless each of the devices along a model axis gets whole heads and columns.

    Hidden features divide where heads do.
    """
    heads, held = config.n_head, config.padded_vocab_size
    if heads % shards:
        raise ValueError(
            f"transformer: n_head = {heads} is not divisible by the {shards} devices along {axis}; "
            f"take {-(-heads // shards) * shards} heads, or a number of devices that divides "
            f"{heads}."
        )
    if held % shards:
        raise ValueError(
            f"transformer: the vocabulary of {config.vocab_size}, held as {held}, is not divisible "
            f"by the {shards} devices along {axis}; take a power of two up to {_PAD_TO}."
        )


def apply(
    params: Params,
    tokens: ArrayLike,
    config: Config,
    layers: Layers = PLAIN,
    key: jax.Array | None = None,
) -> jax.Array:
    """Return float32 logits `[b, t, V]` for tokens `[b, t]`; each sees only those before it.

    V is the padded vocabulary. With sharded layers, parameters are this device's shards, and logits
    `[b, t, V/m]` too. Nothing is dropped without a key.
    """
    dtype = jnp.dtype(config.compute_dtype)
    tokens = jnp.asarray(tokens, jnp.int32)
    width = config.d_model // config.n_head
    x = layers.split_sequence(layers.embedding(params["embed"], tokens).astype(dtype))
    angles = _rotary_angles(tokens.shape[1], width)
    drops = key is not None and config.dropout > 0

    def drop(added: jax.Array, key: jax.Array | None) -> jax.Array:
        if not drops:
            return added
        # Drawn for the whole sequence, then cut: the same for any number of model devices.
        shape = *tokens.shape, config.d_model
        keep = layers.split_sequence(jax.random.bernoulli(key, 1 - config.dropout, shape))
        return jnp.where(keep, added / (1 - config.dropout), 0).astype(dtype)

    def layer(x: jax.Array, of_layer: tuple[Params, jax.Array | None]) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda leaf: leaf.astype(dtype), of_layer[0])
        first, second = (None, None) if not drops else jax.random.split(of_layer[1])
        h = _rms_norm(x, layers.copy(p["attention_scale"]))
        h = layers.column_dense(h, p["qkv"], None)
        q, k, v = jnp.moveaxis(h.reshape(*h.shape[:2], -1, 3, width), 3, 0)
        mixed = _attention(_rotate(q, angles), _rotate(k, angles), v)
        x = x + drop(layers.row_dense(mixed.reshape(*h.shape[:2], -1), p["proj"], None), first)
        h = _rms_norm(x, layers.copy(p["mlp_scale"]))
        h = jax.nn.gelu(layers.column_dense(h, p["up"], None))
        return x + drop(layers.row_dense(h, p["down"], None), second), None

    keys = jax.random.split(key, config.n_layer) if drops else None
    x, _ = jax.lax.scan(_remat(layer, config.remat), x, (params["layers"], keys))
    x = _rms_norm(x, layers.copy(params["final_scale"].astype(dtype)))
    logits = layers.column_dense(x, params["head"].astype(dtype), None)
    return logits.astype(jnp.promote_types(dtype, jnp.float32))


def losses(
    params: Params,
    tokens: ArrayLike,
    config: Config,
    layers: Layers = PLAIN,
    key: jax.Array | None = None,
) -> jax.Array:
    """Return the cross entropy, in nats, of predicting `tokens[:, 1:]`: float32 `[b, t]`."""
    tokens = jnp.asarray(tokens, jnp.int32)
    logits = apply(params, tokens[:, :-1], config, layers, key)
    return layers.cross_entropy(logits, tokens[:, 1:], vocab_size=config.vocab_size)


def loss(
    params: Params,
    tokens: ArrayLike,
    config: Config,
    layers: Layers = PLAIN,
    key: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Return the mean of `losses`; with a mask, bool `[b, t]`, of those where it is True."""
    return jnp.mean(losses(params, tokens, config, layers, key), where=mask)


def size(params: Params) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _remat(layer: Callable[..., Any], how: str) -> Callable[..., Any]:
    """Returns a layer whose backward pass recomputes what `how` says."""
    if how == "none":
        return layer
    policies = jax.checkpoint_policies
    # The sums of sharded layers are kept: recomputed, they would communicate again.
    keep = policies.save_only_these_names("gradaccum/tensor_parallel")
    if how == "dots":
        keep = policies.save_from_both_policies(keep, policies.dots_with_no_batch_dims_saveable)
    return jax.checkpoint(layer, policy=keep)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    # A mean of squares needs more than 8 bits of mantissa.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return normed.astype(x.dtype) * jnp.expand_dims(scale, (0, 1))


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Mix values `[b, t, heads, width]`, each position's with those before it.

    As `jax.nn.dot_product_attention`, but for its softmax in float32 even of float64.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
    seen = jnp.expand_dims(jnp.tri(q.shape[1], dtype=bool), (0, 1))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _rotary_angles(length: int, width: int) -> jax.Array:
    """Return `[1, length, 1, width / 2]` angles: position times a falling frequency."""
    frequency = 10_000.0 ** (-jnp.arange(width // 2, dtype=jnp.float32) * 2 / width)
    return jnp.outer(jnp.arange(length, dtype=jnp.float32), frequency)[None, :, None, :]


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotate the halves of each head's vector `[b, t, heads, width]` by the position's angles."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    a, b = jnp.split(wide, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
