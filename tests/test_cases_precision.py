"""Cases of precision: what a gradient's dtype is inside the loop, and what returns."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)


def loss_fn(params, batch):
    h, _ = jax.lax.scan(lambda h, w: (h * w, None), batch["x"], params["layers"])
    return jnp.sum(batch["mask"] * h * params["w"]) / jnp.sum(batch["mask"])


def by_hand(params, batch):
    """The sum starts from zeros like the parameters; a weight in float32 widens the gradient."""

    def body(total, rows):
        weight = jnp.sum(rows["mask"])
        grads = jax.grad(loss_fn)(params, rows)
        return jax.tree.map(lambda t, g: t + weight * g, total, grads), None

    parts = jax.tree.map(lambda x: x.reshape(2, -1), batch)
    return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)[0]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by value"])
def test_d3_bfloat16_parameters_with_float32_weights(fused):
    batch = {"x": jnp.arange(1.0, 9), "mask": jnp.array([1.0, 1, 1, 0, 1, 0, 0, 0])}
    params = {"layers": jnp.array([1.5, 2], jnp.bfloat16), "w": jnp.bfloat16(-1)}
    with pytest.raises(TypeError, match=r"carry input and carry output must have equal types"):
        jax.eval_shape(by_hand, params, batch)
    fun = gradaccum.accumulate(
        loss_fn, microbatches=2, axis_name=None, weight_fn=helpers.count_tokens, fused=fused
    )
    grads = jit(jax.grad(fun))(params, batch)
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"bfloat16"}
    mean = (1 + 2 + 3 + 5) / 4
    want = {"layers": np.array([-2 * mean, -1.5 * mean]), "w": np.array(3 * mean)}
    helpers.assert_close(grads, want)
