"""A network of the tensor-parallel layers, whole and sharded over 'mp'."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from layouts import jit
from model_axis import cast, sharded

from gradaccum.tensor_parallel import column_dense, embedding, row_dense

V, D, F = 12, 4, 8
SPECS = {"table": P("mp"), "scale": P(), "up": P(None, "mp"), "a": P("mp"), "down": P("mp")}
SPECS |= {"b": P()}
SHAPES = {"table": (V, D), "scale": (D,), "up": (D, F), "a": (F,), "down": (F, D), "b": (D,)}
PARAMS = {name: helpers.normal(i, *shape) / 2 for i, (name, shape) in enumerate(SHAPES.items())}
IDS = np.array([[0, 5, 11], [3, -1, 7]])  # one is padding

SHARDED = {
    "look_up": lambda table, ids: embedding(table, ids, "mp"),
    "columns": lambda x, w, b: column_dense(x, w, b, "mp"),
    "rows": lambda x, w, b: row_dense(x, w, b, "mp"),
}


def dense(x, w, b):
    return x @ w + b[None, None]


WHOLE = {
    "look_up": lambda table, ids: jnp.where((ids >= 0)[..., None], table[ids], 0),
    "columns": dense,
    "rows": dense,
}


def network(p, ids, look_up, columns, rows):
    h = look_up(p["table"], ids)
    normed = h / (1 + jnp.abs(h).max(-1, keepdims=True)) * p["scale"][None, None]
    h += jnp.sin(rows(jnp.tanh(columns(normed, p["up"], p["a"])), p["down"], p["b"]))
    return jnp.sum(h * jnp.sin(jnp.arange(h.size, dtype=h.dtype)).reshape(h.shape))


whole, in_parallel = (functools.partial(network, **layers) for layers in (WHOLE, SHARDED))


def run(fun, m, typed, dtype="float32"):
    """Returns loss and gradients of the sharded network."""
    fun = sharded(jax.value_and_grad(fun), (SPECS, P()), (P(), SPECS), m, typed)
    return jit(fun)(cast(PARAMS, dtype), IDS)
