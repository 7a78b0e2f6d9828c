"""A small model, its specs, and its loss decorated with any: for the tests of specs."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradaccum

B = 32
PARAMS = {
    "block": {"w": helpers.normal(0, 8, 16), "v": helpers.normal(1, 16, 8)},
    "b": helpers.normal(2, 8),
}
PARAMS = jax.tree.map(lambda x: x.astype(np.float32) / 2, PARAMS)
BATCH = {n: helpers.normal(i, B, 8).astype(np.float32) for i, n in enumerate("xy", 7)}
REPLICATED = {"block": {"w": P(), "v": P()}, "b": P()}
SPLIT = {"block": {"w": P(None, "dp"), "v": P("dp")}, "b": P()}
MODEL = {"block": {"w": P(None, "mp"), "v": P("mp")}, "b": P()}


def loss_fn(params, batch, f=lambda x: x, g=lambda x: x):
    h = jnp.tanh(f(batch["x"]) @ params["block"]["w"])
    y = g(h @ params["block"]["v"]) + params["b"][None]
    return jnp.mean(jnp.sin(y) * batch["y"])


@functools.cache
def mesh_of(kind=AxisType.Auto, **sizes):
    return layouts.mesh_of(sizes or {"dp": 8}, kind)


def decorate(fun=loss_fn, **options):
    return gradaccum.accumulate(
        fun, **{"microbatches": 2, "axis_name": "dp", "mesh": mesh_of()} | options
    )


@functools.cache
def expected():
    return layouts.in_float64(jax.value_and_grad(loss_fn), PARAMS, BATCH)


def spec(x):
    """Returns the spec of an array, by name alone."""
    dims = [d if d is None or isinstance(d, str) else tuple(d) for d in x.sharding.spec]
    while dims and dims[-1] is None:
        dims.pop()
    return P(*dims)
