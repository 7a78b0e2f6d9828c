"""A pair of matrices split over a manual model axis, and its decorated loss."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum.tensor_parallel import copy_to, reduce_from

B, D, H, M = 16, 4, 8, 2
SPECS = {"w": P(None, "mp"), "v": P("mp"), "b": P()}
PARAMS = {"w": helpers.normal(0, D, H), "v": helpers.normal(1, H, D), "b": helpers.normal(2, D)}
PARAMS = jax.tree.map(lambda x: x.astype(np.float32) / 2, PARAMS)
BATCH = {n: helpers.normal(i, B, D).astype(np.float32) for i, n in enumerate("xy", 7)}

f, g = (functools.partial(o, axis_name="mp") for o in (copy_to, reduce_from))


def loss_fn(p, batch, f=lambda x: x, g=lambda x: x):
    y = g(jnp.tanh(f(batch["x"]) @ p["w"]) @ p["v"]) + p["b"][None]
    return jnp.mean(jnp.sin(y) * batch["y"])


def parallel(p, batch):
    return loss_fn(p, batch, f, g)


@functools.cache
def mesh():
    return layouts.mesh_of({"dp": 2, "mp": M})


def decorate(fun, **options):
    given = {"microbatches": 2, "axis_name": "dp", "mesh": mesh(), "in_specs": (SPECS,)}
    return gradaccum.accumulate(fun, **given | options)


@functools.cache
def expected():
    return layouts.in_float64(jax.value_and_grad(loss_fn), PARAMS, BATCH)


named = functools.partial(pytest.mark.parametrize, ids=lambda x: getattr(x, "__name__", str(x)))
