"""Models for the proof that sharded gradients are the unsharded ones: each whole, and sharded.

The whole one shares no library code with the sharded one: it is what a user had before. Every bias
and scale is random, as zeros and ones would hide a bias that is added m times, or a gradient that
lacks its sum.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import haiku_model, transformer
from absl_apps.layers import PLAIN, sharded
from gradaccum.tensor_parallel import column_dense, cross_entropy, embedding, row_dense

MESHES = {"1x4": (1, 4), "2x4": (2, 4), "4x2": (4, 2), "8x1": (8, 1)}
B, T, V, D, H = 32, 8, 12, 8, 16

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)


@functools.cache
def mesh_of(name):
    """Returns a mesh dp x mp, its axes automatic."""
    devices = jax.devices()[: np.prod(MESHES[name])]
    return jax.make_mesh(MESHES[name], ("dp", "mp"), (AxisType.Auto,) * 2, devices=devices)


def place(tree, mesh, specs):
    """Puts whole arrays where a prefix of specs says."""
    put = lambda spec, part: jax.tree.map(  # noqa: E731
        lambda x: jax.device_put(x, NamedSharding(mesh, spec)), part
    )
    return jax.tree.map(put, specs, tree, is_leaf=lambda x: isinstance(x, P))


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """One model.

    Attributes:
      init: () -> whole parameters, NumPy arrays in float64.
      whole: (parameters, batch) -> loss, with JAX and its own library alone.
      sharded: the same of one device's shards, inside a manual region over 'mp'.
      specs: how the parameters lie.
      counts: kind -> collectives over 'mp' of one microbatch, forward and backward.
      weighted: whether its loss is a mean over targets, of which some are ignored.
    """

    init: Callable[[], Any]
    whole: Callable[..., jax.Array]
    sharded: Callable[..., jax.Array]
    specs: Any
    counts: dict[str, int]
    weighted: bool = False

    def options(self):
        """Returns what `gradaccum.accumulate` is given for it."""
        given = {"axis_name": "dp", "in_specs": (self.specs,)}
        return given | ({"weight_fn": count_targets} if self.weighted else {})


def make_batch(seed=11):
    """Returns B rows; some of their targets are ignored, unequally many, and all of 8 rows."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (B, T + 1), dtype=np.int32)
    targets = np.where(rng.random((B, T)) < 0.3, -1, tokens[:, 1:])
    targets[4:12] = -1
    targets[12] = V  # past the end is ignored too
    return {"tokens": tokens, "ids": tokens[:, :-1], "targets": targets.astype(np.int32)}


def count_targets(batch):
    return ((batch["targets"] >= 0) & (batch["targets"] < V)).sum().astype(jnp.float32)


def _whole_losses(logits, targets):
    counts = (targets >= 0) & (targets < V)
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.where(counts, targets, 0)[..., None], axis=-1
    )
    return jnp.where(counts, -picked[..., 0], 0)


def _mean_of_targets(losses, batch):
    """0/0 where none counts, as such losses are."""
    return losses.sum() / count_targets(batch).astype(losses.dtype)


def _norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
    return x * scale[None, None] + bias[None, None]


def _random(shapes, seed):
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    arrays = [helpers.normal(seed + i, *s) / np.sqrt(s[0] if len(s) > 1 else 4)
              for i, s in enumerate(leaves)]  # fmt: skip
    return jax.tree.unflatten(tree, arrays)


def _like(shapes, seed):
    """Returns random arrays of a tree of abstract ones."""
    return _random(jax.tree.map(lambda x: x.shape, shapes), seed)


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


def mlp_whole(p, batch):
    x = p["table"][batch["ids"]]
    h = _norm(x, p["scale"], p["shift"])
    h = jnp.tanh(h @ p["up"] + p["up_bias"][None, None])
    x = x + h @ p["down"] + p["down_bias"][None, None]
    logits = x @ p["out"] + p["out_bias"][None, None]
    return _mean_of_targets(_whole_losses(logits, batch["targets"]), batch)


def mlp_sharded(p, batch):
    x = embedding(p["table"], batch["ids"], "mp")
    h = _norm(x, p["scale"], p["shift"])
    h = jnp.tanh(column_dense(h, p["up"], p["up_bias"], "mp"))
    x = x + row_dense(h, p["down"], p["down_bias"], "mp")
    logits = column_dense(x, p["out"], p["out_bias"], "mp")
    return _mean_of_targets(cross_entropy(logits, batch["targets"], "mp"), batch)


TIED = {"table": (V, D), "up": (D, H), "down": (H, D), "down_bias": (D,), "out_bias": (V,)}


def tied_whole(p, batch):
    x = p["table"][batch["ids"]]
    x = x + jnp.sin(x @ p["up"]) @ p["down"] + p["down_bias"][None, None]
    logits = x @ p["table"].T + p["out_bias"][None, None]
    return _mean_of_targets(_whole_losses(logits, batch["targets"]), batch)


def tied_sharded(p, batch):
    x = embedding(p["table"], batch["ids"], "mp")
    h = jnp.sin(column_dense(x, p["up"], None, "mp"))
    x = x + row_dense(h, p["down"], p["down_bias"], "mp")
    logits = column_dense(x, p["table"].T, p["out_bias"], "mp")
    return _mean_of_targets(cross_entropy(logits, batch["targets"], "mp"), batch)


# --- Flax linen: nn.Embed, nn.LayerNorm and nn.Dense, and the same parameters as shards ---------


class Whole(nn.Module):
    """What a user had."""

    dtype: Any

    @nn.compact
    def __call__(self, ids):
        dense = functools.partial(nn.Dense, param_dtype=self.dtype)
        x = nn.Embed(V, D, param_dtype=self.dtype, name="embed")(ids)
        h = nn.LayerNorm(param_dtype=self.dtype, name="norm")(x)
        x = x + dense(D, name="down")(nn.gelu(dense(H, name="up")(h)))
        return dense(V, name="out")(x)


class Dense(nn.Module):
    """`nn.Dense` on this device's shards of its parameters; each says its own shapes."""

    layer: Callable[..., jax.Array]
    shape: tuple[int, int]
    bias: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), self.shape, self.dtype)
        bias = self.param("bias", nn.initializers.normal(), (self.bias,), self.dtype)
        return self.layer(x, kernel, bias, "mp")


class Embed(nn.Module):
    """`nn.Embed` on this device's rows."""

    shape: tuple[int, int]
    dtype: Any

    @nn.compact
    def __call__(self, ids):
        table = self.param("embedding", nn.initializers.normal(), self.shape, self.dtype)
        return embedding(table, ids, "mp")


class Sharded(nn.Module):
    """Whole, sharded over 'mp'; the norm is Flax's own."""

    dtype: Any

    @nn.compact
    def __call__(self, ids):
        m, t = jax.lax.axis_size("mp"), self.dtype
        x = Embed((V // m, D), t, name="embed")(ids)
        h = nn.LayerNorm(param_dtype=t, name="norm")(x)
        h = nn.gelu(Dense(column_dense, (D, H // m), H // m, t, name="up")(h))
        x = x + Dense(row_dense, (H // m, D), D, t, name="down")(h)
        return Dense(column_dense, (D, V // m), V // m, t, name="out")(x)


LINEN_SPECS = {
    "embed": {"embedding": P("mp")},
    "norm": {"scale": P(), "bias": P()},
    "up": {"kernel": P(None, "mp"), "bias": P("mp")},
    "down": {"kernel": P("mp"), "bias": P()},
    "out": {"kernel": P(None, "mp"), "bias": P("mp")},
}


def linen_init():
    ids = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(lambda: Whole(jnp.float32).init(jax.random.key(0), ids)["params"])
    return _like(shapes, 30)


def linen_whole(p, batch):
    logits = Whole(p["norm"]["bias"].dtype).apply({"params": p}, batch["ids"])
    return _whole_losses(logits, batch["tokens"][:, 1:]).mean()


def linen_sharded(p, batch):
    logits = Sharded(p["norm"]["bias"].dtype).apply({"params": p}, batch["ids"])
    return cross_entropy(logits, batch["tokens"][:, 1:], "mp").mean()


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
    return eqx.combine(_like(shapes, 50), static)


def equinox_whole(net, batch):
    rows = lambda f: jax.vmap(jax.vmap(f))  # noqa: E731
    x = net.table[batch["ids"]]
    x = x + rows(net.down)(net.act(rows(net.up)(x)))
    return _whole_losses(rows(net.out)(x), batch["tokens"][:, 1:]).mean()


def equinox_sharded(net, batch):
    """Linear's weights are [out, in]: a shard of columns is one of its rows."""
    x = embedding(net.table, batch["ids"], "mp")
    h = net.act(column_dense(x, net.up.weight.T, net.up.bias, "mp"))
    x = x + row_dense(h, net.down.weight.T, net.down.bias, "mp")
    logits = column_dense(x, net.out.weight.T, net.out.bias, "mp")
    return cross_entropy(logits, batch["tokens"][:, 1:], "mp").mean()


def _equinox_specs():
    of = lambda net: (net.table, net.up.weight, net.up.bias, net.down.weight, net.down.bias,  # noqa: E731
                      net.out.weight, net.out.bias)  # fmt: skip
    specs = (P("mp"), P("mp"), P("mp"), P(None, "mp"), P(), P("mp"), P("mp"))
    return eqx.tree_at(of, eqx.filter(equinox_init(), eqx.is_array), specs)


# --- The programs' models ------------------------------------------------------------------------


def _dtype(p):
    return str(jax.tree.leaves(p)[0].dtype)


def haiku_loss(p, batch, layers):
    return haiku_model.loss(p, batch["tokens"], haiku_model.Config(V, D, 2, _dtype(p)), layers)


def haiku_init():
    return jax.tree.map(
        lambda x: np.asarray(x, np.float64),
        jit(lambda: haiku_model.init(jax.random.key(0), haiku_model.Config(V, D, 2)))(),
    )


HEADS, LAYERS = 4, 2


def transformer_loss(p, batch, layers):
    config = transformer.Config(2 * D, LAYERS, HEADS, _dtype(p))
    return transformer.loss(p, batch["tokens"], config, layers)


def transformer_init():
    """Random scales too, and a head that is not zero."""
    config = transformer.Config(2 * D, LAYERS, HEADS, "float32")
    p = _like(jax.eval_shape(lambda: transformer.init(jax.random.key(0), config)), 60)
    p["layers"] = jax.tree.map(lambda x: x * (LAYERS**0.5 / x.shape[-2] ** 0.5), p["layers"])
    return p | {"embed": p["embed"] * 16}


def _of_layers(init, loss, specs, counts, sequence_parallel=False):
    return Model(
        init,
        functools.partial(loss, layers=PLAIN),
        functools.partial(loss, layers=sharded("mp", sequence_parallel)),
        specs,
        counts,
    )


# Of one microbatch: the embedding's sum, a sum behind each pair of matrices and, backward, one in
# front of it, one in front of the logits, and the maximum and the sums of the cross entropy.
def _reductions(pairs):
    return {"all-reduce": 1 + 2 * pairs + 1 + 2}


# A layer is recomputed in its backward pass, but its sums are kept. With sequence parallelism what
# enters a column-sharded product is gathered again, and the scale of each norm, which is used on a
# part of the sequence, has a sum of its own.
_SEQUENCE = {
    "all-reduce": 1 + LAYERS * 2 + 1 + 2,  # embedding, scales, the last scale, cross entropy
    "all-gather": LAYERS * (2 + 2 + 2) + 1 + 1,  # columns, again, rows' backward; logits, split
    "reduce-scatter": LAYERS * (2 + 2) + 1,  # rows, columns' backward; logits' backward
}

MODELS = {
    "mlp": Model(
        lambda: _random(MLP, 0), mlp_whole, mlp_sharded, MLP_SPECS, _reductions(1), weighted=True
    ),
    "tied": Model(
        lambda: _random(TIED, 10),
        tied_whole,
        tied_sharded,
        {name: MLP_SPECS[name] for name in TIED},
        _reductions(1),
        weighted=True,
    ),
    "haiku": _of_layers(
        haiku_init, haiku_loss, haiku_model.specs(haiku_model.Config(V, D, 2), "mp"), _reductions(2)
    ),
    "linen": Model(linen_init, linen_whole, linen_sharded, LINEN_SPECS, _reductions(1)),
    "equinox": Model(
        equinox_init, equinox_whole, equinox_sharded, _equinox_specs(), _reductions(1)
    ),
    "transformer": _of_layers(
        transformer_init, transformer_loss, transformer.specs("mp"), _reductions(2 * LAYERS)
    ),
    "sequence": _of_layers(
        transformer_init, transformer_loss, transformer.specs("mp"), _SEQUENCE, True
    ),
}


def value_and_grad(fun):
    """Returns the derivative of a loss whose parameters may have leaves that are no arrays."""
    return eqx.filter_value_and_grad(fun)


def arrays(tree, dtype=None):
    """Returns a tree of its arrays alone, as this dtype."""
    tree = eqx.filter(tree, eqx.is_array)
    return tree if dtype is None else jax.tree.map(lambda x: np.asarray(x, dtype), tree)


@functools.cache
def reference(name):
    """Returns loss and gradients of the whole model on the full batch, one device, in float64."""
    model = MODELS[name]
    with jax.enable_x64(True):
        # Compiled alike: the transformer's rotary angles are float32 in any dtype.
        params, static = eqx.partition(model.init(), eqx.is_array)
        grad = value_and_grad(model.whole)
        fun = jit(lambda p, batch: grad(eqx.combine(p, static), batch))
        return jax.device_get(fun(params, make_batch()))


def over(report, axis):
    """Returns the collectives over an axis: kind -> arrays a call; XLA may combine operations."""
    found = collections.Counter()
    for row in report:
        if axis in row.axes:
            assert row.axes == (axis,), str(report)
            found[row.kind] += row.executions * len(row.shapes)
    return dict(found)
