"""A loss that is quadratic in nothing, and the same decorated, on a mesh or without."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np

import gradaccum

B, D, K = 16, 3, 2

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)


def loss_fn(params, batch):
    """A small network, a layer stack in it, not quadratic in anything."""
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["layers"])
    losses = jnp.sum(jnp.sin(h * params["out"][None]), axis=-1)
    return jnp.sum(batch["mask"] * losses) / jnp.sum(batch["mask"])


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PARAMS = {"layers": draw(0, 2, D, D) / 2, "out": draw(1, D)}
TANGENT = {"layers": draw(2, 2, D, D), "out": draw(3, D)}
BATCH = {"x": draw(4, B, D), "mask": jnp.ones(B)}
# Unequal counts; on the mesh two devices have no row at all.
MASKED = BATCH | {
    "mask": jnp.asarray([1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1], jnp.float32)
}


def on(where, weighted=False, **options):
    """Returns the decorated loss, on a mesh of eight devices or without."""
    options |= {"fused": False} | options
    options |= {"axis_name": None} if where == "alone" else {"mesh": helpers.data_mesh(8)}
    if weighted:
        options["weight_fn"] = helpers.count_tokens
    return gradaccum.accumulate(loss_fn, microbatches=K, **options)
