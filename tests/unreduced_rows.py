"""What the tests of `Unreduced` share: rows by hand and of a loss, their mesh, their references."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import Unreduced

jit = layouts.jit
N = 8
MESH = helpers.data_mesh(N)
ROWS = NamedSharding(MESH, P("dp"))
ON_MESH = {"axis_name": "dp", "mesh": MESH}


def rows(*shape, dtype=np.float32, seed=0):
    return helpers.normal(seed, N, *shape).astype(dtype)


def weights(seed=0, dtype=np.float32):
    """Returns unequal whole weights, one of them 0."""
    return np.random.default_rng(seed).permutation(N).astype(dtype)


def loss_fn(params, batch):
    return jnp.mean(helpers.dense(params, batch))


fun = gradaccum.unreduced_value_and_grad(loss_fn, **ON_MESH)


@functools.cache
def case():
    """Returns parameters, a batch, their loss and gradients unreduced, and these in float64."""
    params, batch = helpers.init("dense", np.float32), helpers.make_batch()
    want = helpers.reference("dense", "mean", params, batch)
    return params, batch, jit(fun)(params, batch), want


def is_rows(x):
    return isinstance(x, Unreduced)


def leaves_of(tree):
    return jax.tree.leaves(tree, is_leaf=is_rows)


def hand(*shape, axis_name="dp", n=N, **options):
    return Unreduced(np.ones((n, *shape), np.float32), np.ones(n, np.float32), axis_name, **options)


# --- Of any model ---------------------------------------------------------------------------------


def options_of(reduction):
    return {
        "mean": {},
        "sum": {"loss_reduction": "sum"},
        "tokens": {"weight_fn": helpers.count_tokens},
    }[reduction]


def unreduced(model="dense", reduction="mean", **options):
    loss_fn = helpers.loss_of(model, reduction)
    options = ON_MESH | options_of(reduction) | options
    return gradaccum.unreduced_value_and_grad(loss_fn, **options)


def make(model="dense", reduction="mean", dtype=np.float32):
    """Returns parameters, a batch, and the full batch's loss and gradients in float64."""
    params, batch = helpers.init(model, dtype), helpers.make_batch()
    return params, batch, helpers.reference(model, reduction, params, batch)


# --- Of a pair of matrices ------------------------------------------------------------------------


def kinds_over(report, axes):
    return [row.kind for row in report if set(row.axes) & set(axes)]


@functools.cache
def pair():
    """Returns `pair_loss`'s parameters, its batch, and its loss and gradients in float64."""
    params, batch = layouts.init_pair(), layouts.pair_batch()
    return params, batch, layouts.in_float64(jax.value_and_grad(layouts.pair_loss), params, batch)
