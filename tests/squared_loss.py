"""A squared error, its arrays, and the decorator on eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import gradaccum

B, D = 64, 4


def mesh():
    return jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))


def on_mesh():
    """Returns the decorator, of a loss on this mesh."""
    return functools.partial(gradaccum.accumulate, axis_name="dp", mesh=mesh())


def arrays():
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(D, 3)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(B, D)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(B, 3)), jnp.float32)
    return w, x, y


def squared(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def assert_close(got, want, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())
