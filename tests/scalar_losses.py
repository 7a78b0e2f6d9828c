"""Losses of one scalar, whose values are known, and the decorated loss with its gradient."""

import helpers
import jax
import jax.numpy as jnp

import gradaccum


def scaled(w, batch):
    return w * batch["x"]


def masked_mean(w, batch):
    """0/0 where nothing is valid."""
    return jnp.sum(batch["mask"] * scaled(w, batch)) / jnp.sum(batch["mask"])


def run(loss_fn, *args, microbatches=2, axis_name=None, **options):
    """Returns loss and gradient of the decorated function."""
    fun = gradaccum.accumulate(loss_fn, microbatches=microbatches, axis_name=axis_name, **options)
    return jax.jit(jax.value_and_grad(fun), compiler_options=helpers.COMPILE_FAST)(*args)


def rows(*x, **more):
    return {"x": jnp.array(x, jnp.float32)} | {n: jnp.array(v) for n, v in more.items()}


ONE = jnp.float32(1)
