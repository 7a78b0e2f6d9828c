"""Dtypes of the decorator's loss, gradients, accumulator and reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import squared_loss
from squared_loss import B, D, arrays, assert_close, squared

import gradaccum


@pytest.fixture(scope="module")
def on_mesh():
    return squared_loss.on_mesh()


def test_b8_integer_leaves_are_as_in_jax_grad(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(lambda p, b: jnp.mean(b @ p["w"]) * p["n"], microbatches=2)
    params = {"w": w, "n": jnp.int32(3)}
    with pytest.raises(TypeError, match="real- or complex-valued"):
        jax.grad(f)(params, x)
    grads = jax.grad(f, allow_int=True)(params, x)
    assert grads["n"].dtype == jax.dtypes.float0
    assert_close(grads["w"], 3 * jax.grad(lambda w: jnp.mean(x @ w))(w))


def test_complex_and_float64_accumulate_in_their_own_dtype():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x = jnp.asarray(rng.normal(size=(B, D)))
        for dtype in (jnp.complex64, jnp.float64, jnp.complex128):
            w = jnp.asarray(rng.normal(size=(D,)) + (1j if dtype != jnp.float64 else 0), dtype)
            loss_fn = lambda w, x: jnp.mean(jnp.abs(x.astype(w.dtype) @ w) ** 2)  # noqa: E731
            f = gradaccum.accumulate(loss_fn, microbatches=8, axis_name=None)
            loss, grad = jax.value_and_grad(f)(w, x)
            want_loss, want = jax.value_and_grad(loss_fn)(w, x)
            assert grad.dtype == dtype
            assert loss.dtype == want_loss.dtype
            assert_close((loss, grad), (want_loss, want), 1e-6 if dtype == jnp.complex64 else 1e-14)


def test_accumulator_and_reduce_dtypes(on_mesh):
    w, x, y = arrays()
    narrow = on_mesh(squared, microbatches=2, batch_argnums=(1, 2), reduce_dtype=jnp.bfloat16)
    program = str(jax.make_jaxpr(jax.grad(narrow))(w, x, y))
    assert "bf16[4,3]" in program
    assert_close(jax.grad(narrow)(w, x, y), jax.grad(squared)(w, x, y), 2e-2)
    low = gradaccum.accumulate(
        lambda w, x: jnp.mean(x * w), microbatches=1024, axis_name=None,
        accumulator_dtype=jnp.bfloat16, loss_reduction="sum",
    )  # fmt: skip
    high = gradaccum.accumulate(
        lambda w, x: jnp.mean(x * w), microbatches=1024, axis_name=None, loss_reduction="sum"
    )
    one = jnp.ones((), jnp.bfloat16)
    assert float(jax.grad(high)(one, jnp.ones(1024, jnp.bfloat16))) == 1024
    assert float(jax.grad(low)(one, jnp.ones(1024, jnp.bfloat16))) == 256  # D1: it stops there


def test_the_loss_keeps_its_dtype(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(lambda w, x: jnp.mean(x @ w).astype(jnp.bfloat16), microbatches=2)
    loss, grad = jax.value_and_grad(f)(w, x)
    assert loss.dtype == jnp.bfloat16
    assert grad.dtype == jnp.float32


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by-value"])
def test_float16_inside_a_float32_loss_neither_underflows_nor_overflows(fused):
    def loss_fn(w, x):
        def layer(h, w):
            return (h.astype(jnp.float16) * w.astype(jnp.float16)).astype(jnp.float32), None

        return 1e-4 * jnp.sum(jax.lax.scan(layer, x, w)[0])

    w, x = jnp.ones((1,)), jnp.ones((1024,))
    f = gradaccum.accumulate(loss_fn, microbatches=1024, axis_name=None, fused=fused)
    np.testing.assert_allclose(jax.grad(f)(w, x), [1e-4], rtol=2e-3)
    heavy = gradaccum.accumulate(
        lambda w, x: 1e6 * loss_fn(w, x), microbatches=2, axis_name=None, fused=fused,
        weight_fn=lambda x: jnp.float32(4096),
    )  # fmt: skip
    np.testing.assert_allclose(jax.grad(heavy)(w, x[:2]), [100.0], rtol=2e-3)
