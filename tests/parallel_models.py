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
import parallel_functions as functions
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_losses import D, H, V, arrays_like, count_targets, random_arrays, whole_losses

from absl_apps import haiku_model, transformer
from absl_apps.layers import PLAIN, sharded
from gradaccum.tensor_parallel import column_dense, cross_entropy, embedding, row_dense

MESHES = {"1x4": (1, 4), "2x4": (2, 4), "4x2": (4, 2), "8x1": (8, 1)}
B, T = 32, 8

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
    return arrays_like(shapes, 30)


def linen_whole(p, batch):
    logits = Whole(p["norm"]["bias"].dtype).apply({"params": p}, batch["ids"])
    return whole_losses(logits, batch["tokens"][:, 1:]).mean()


def linen_sharded(p, batch):
    logits = Sharded(p["norm"]["bias"].dtype).apply({"params": p}, batch["ids"])
    return cross_entropy(logits, batch["tokens"][:, 1:], "mp").mean()


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
    p = arrays_like(jax.eval_shape(lambda: transformer.init(jax.random.key(0), config)), 60)
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
        lambda: random_arrays(functions.MLP, 0),
        functions.mlp_whole,
        functions.mlp_sharded,
        functions.MLP_SPECS,
        _reductions(1),
        weighted=True,
    ),
    "tied": Model(
        lambda: random_arrays(functions.TIED, 10),
        functions.tied_whole,
        functions.tied_sharded,
        {name: functions.MLP_SPECS[name] for name in functions.TIED},
        _reductions(1),
        weighted=True,
    ),
    "haiku": _of_layers(
        haiku_init, haiku_loss, haiku_model.specs(haiku_model.Config(V, D, 2), "mp"), _reductions(2)
    ),
    "linen": Model(linen_init, linen_whole, linen_sharded, LINEN_SPECS, _reductions(1)),
    "equinox": Model(
        functions.equinox_init,
        functions.equinox_whole,
        functions.equinox_sharded,
        functions.equinox_specs(),
        _reductions(1),
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
