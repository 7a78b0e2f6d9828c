"""A decoder-only transformer in plain JAX: parameters are a dict, the model is a function.

The layers are stacked along a leading axis and run in one `jax.lax.scan` under `jax.checkpoint`,
so program size and activation memory do not grow with depth. Parameters are float32 and are cast
to the compute dtype *inside* the layer: the stack then reaches the scan as it is stored, which is
what lets `gradaccum.accumulate` add its gradients in place.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

VOCABULARY = 256  # bytes

Params = dict[str, "jax.Array | Params"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a transformer; `d_model` is a multiple of `2 * n_head` (rotary pairs)."""

    d_model: int
    n_layer: int
    n_head: int
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if min(self.d_model, self.n_layer, self.n_head) < 1:
            raise ValueError(f"transformer: every size must be at least 1, got {self}")
        if self.d_model % (2 * self.n_head):
            raise ValueError(
                f"transformer: d_model = {self.d_model} is not divisible by 2 * n_head = "
                f"2 * {self.n_head} = {2 * self.n_head} (each head needs an even width, which "
                "rotary positions pair up)."
            )


def init(key: jax.Array, config: Config) -> Params:
    """Return float32 parameters; the leaves under `"layers"` are `[n_layer, ...]`.

    The output head starts at zero, so the first loss is log(256) nats whatever the sizes.
    """
    D, L = config.d_model, config.n_layer
    embed, qkv, proj, up, down = jax.random.split(key, 5)

    def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5

    return {
        "embed": normal(embed, (VOCABULARY, D), 1),
        "layers": {
            "attention_scale": jnp.ones((L, D)),
            "qkv": normal(qkv, (L, D, 3 * D), D),
            # 2 L branches add into the residual stream: keep their sum of order one.
            "proj": normal(proj, (L, D, D), 2 * L * D),
            "mlp_scale": jnp.ones((L, D)),
            "up": normal(up, (L, D, 4 * D), D),
            "down": normal(down, (L, 4 * D, D), 2 * L * 4 * D),
        },
        "final_scale": jnp.ones((D,)),
        "head": jnp.zeros((D, VOCABULARY)),
    }


def apply(params: Params, tokens: ArrayLike, config: Config) -> jax.Array:
    """Return float32 logits `[b, t, 256]` for tokens `[b, t]`; each sees only those before it."""
    dtype = jnp.dtype(config.compute_dtype)
    tokens = jnp.asarray(tokens, jnp.int32)
    x = params["embed"][tokens].astype(dtype)
    angles = _rotary_angles(tokens.shape[1], config.d_model // config.n_head)

    @jax.checkpoint
    def layer(x: jax.Array, stored: Params) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda leaf: leaf.astype(dtype), stored)
        h = _rms_norm(x, p["attention_scale"]) @ p["qkv"]
        q, k, v = jnp.split(h.reshape(*h.shape[:2], 3 * config.n_head, -1), 3, axis=2)
        mixed = jax.nn.dot_product_attention(
            _rotate(q, angles), _rotate(k, angles), v, is_causal=True
        )
        x = x + mixed.reshape(x.shape) @ p["proj"]
        h = jax.nn.gelu(_rms_norm(x, p["mlp_scale"]) @ p["up"])
        return x + h @ p["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = _rms_norm(x, params["final_scale"].astype(dtype))
    return (x @ params["head"].astype(dtype)).astype(jnp.float32)


def loss(params: Params, tokens: ArrayLike, config: Config) -> jax.Array:
    """Return the mean cross entropy, in nats a byte, of predicting `tokens[:, 1:]` `[b, t]`."""
    tokens = jnp.asarray(tokens, jnp.int32)
    log_probs = jax.nn.log_softmax(apply(params, tokens[:, :-1], config))
    picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked)


def size(params: Params) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)  # a mean of squares needs more than 8 bits of mantissa
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return normed.astype(x.dtype) * jnp.expand_dims(scale, (0, 1))


def _rotary_angles(length: int, width: int) -> jax.Array:
    """Return `[1, length, 1, width / 2]` angles: position times a falling frequency."""
    frequency = 10_000.0 ** (-jnp.arange(width // 2, dtype=jnp.float32) * 2 / width)
    return jnp.outer(jnp.arange(length, dtype=jnp.float32), frequency)[None, :, None, :]


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotate the halves of each head's vector `[b, t, heads, width]` by the position's angles."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
