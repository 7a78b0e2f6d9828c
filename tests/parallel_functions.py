"""Models as plain functions of arrays and as an Equinox module, each whole and sharded."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from parallel_losses import D, H, V, arrays_like, mean_of_targets, whole_losses

from gradaccum.tensor_parallel import column_dense, cross_entropy, embedding, row_dense

# --- Plain functions -----------------------------------------------------------------------------

MLP = {
    "table": (V, D),
    "scale": (D,),
    "shift": (D,),
    "up": (D, H),
    "up_bias": (H,),
    "down": (H, D),
    "down_bias": (D,),
    "out": (D, V),
    "out_bias": (V,),
}
MLP_SPECS = {
    "table": P("mp"),
    "scale": P(),
    "shift": P(),
    "up": P(None, "mp"),
    "up_bias": P("mp"),
    "down": P("mp"),
    "down_bias": P(),
    "out": P(None, "mp"),
    "out_bias": P("mp"),
}


def norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
    return x * scale[None, None] + bias[None, None]


def mlp_whole(p, batch):
    x = p["table"][batch["ids"]]
    h = norm(x, p["scale"], p["shift"])
    h = jnp.tanh(h @ p["up"] + p["up_bias"][None, None])
    x = x + h @ p["down"] + p["down_bias"][None, None]
    logits = x @ p["out"] + p["out_bias"][None, None]
    return mean_of_targets(whole_losses(logits, batch["targets"]), batch)


def mlp_sharded(p, batch):
    x = embedding(p["table"], batch["ids"], "mp")
    h = norm(x, p["scale"], p["shift"])
    h = jnp.tanh(column_dense(h, p["up"], p["up_bias"], "mp"))
    x = x + row_dense(h, p["down"], p["down_bias"], "mp")
    logits = column_dense(x, p["out"], p["out_bias"], "mp")
    return mean_of_targets(cross_entropy(logits, batch["targets"], "mp"), batch)


TIED = {"table": (V, D), "up": (D, H), "down": (H, D), "down_bias": (D,), "out_bias": (V,)}


def tied_whole(p, batch):
    x = p["table"][batch["ids"]]
    x = x + jnp.sin(x @ p["up"]) @ p["down"] + p["down_bias"][None, None]
    logits = x @ p["table"].T + p["out_bias"][None, None]
    return mean_of_targets(whole_losses(logits, batch["targets"]), batch)


def tied_sharded(p, batch):
    x = embedding(p["table"], batch["ids"], "mp")
    h = jnp.sin(column_dense(x, p["up"], None, "mp"))
    x = x + row_dense(h, p["down"], p["down_bias"], "mp")
    logits = column_dense(x, p["table"].T, p["out_bias"], "mp")
    return mean_of_targets(cross_entropy(logits, batch["targets"], "mp"), batch)


# --- Equinox: a module of arrays, and a function among its leaves --------------------------------


class Net(eqx.Module):
    table: Any
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    out: eqx.nn.Linear
    act: Callable[..., Any]

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.table = jax.random.normal(keys[0], (V, D))
        self.up, self.down, self.out = (
            eqx.nn.Linear(*sizes, key=key)
            for sizes, key in zip(((D, H), (H, D), (D, V)), keys[1:], strict=True)
        )
        self.act = jax.nn.silu


def equinox_init():
    net = eqx.filter_eval_shape(Net, jax.random.key(5))
    shapes, static = eqx.partition(net, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return eqx.combine(arrays_like(shapes, 50), static)


def equinox_whole(net, batch):
    rows = lambda f: jax.vmap(jax.vmap(f))  # noqa: E731
    x = net.table[batch["ids"]]
    x = x + rows(net.down)(net.act(rows(net.up)(x)))
    return whole_losses(rows(net.out)(x), batch["tokens"][:, 1:]).mean()


def equinox_sharded(net, batch):
    """Linear's weights are [out, in]: a shard of columns is one of its rows."""
    x = embedding(net.table, batch["ids"], "mp")
    h = net.act(column_dense(x, net.up.weight.T, net.up.bias, "mp"))
    x = x + row_dense(h, net.down.weight.T, net.down.bias, "mp")
    logits = column_dense(x, net.out.weight.T, net.out.bias, "mp")
    return cross_entropy(logits, batch["tokens"][:, 1:], "mp").mean()


def equinox_specs():
    of = lambda net: (net.table, net.up.weight, net.up.bias, net.down.weight, net.down.bias,  # noqa: E731
                      net.out.weight, net.out.bias)  # fmt: skip
    specs = (P("mp"), P("mp"), P("mp"), P(None, "mp"), P(), P("mp"), P("mp"))
    return eqx.tree_at(of, eqx.filter(equinox_init(), eqx.is_array), specs)
