"""What goes wrong without each part of the layers: gradients, types, the row bias (T1 to T10)."""

import functools

import helpers
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_network import IDS, PARAMS, SHARDED, dense, network, run, whole
from layouts import in_float64, jit
from model_axis import sharded

from gradaccum.tensor_parallel import column_dense, copy_to, reduce_from, row_dense

CONTROLS = {  # a broken layer, the leaves whose gradient is wrong, and by what factor (None: other)
    "psum instead of g (T1)": (
        {"rows": lambda x, w, b: jax.lax.psum(x @ w, "mp") + b[None, None]},
        {"scale": 2, "up": 2, "a": 2, "down": 2},
        {"table"},
    ),
    "no f (T5)": ({"columns": dense}, {}, {"table", "scale"}),
    "one f too many": (
        {"columns": lambda x, w, b: column_dense(copy_to(x, "mp"), w, b, "mp")},
        {"scale": 2},
        {"table"},
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_t1_t5_untyped_without_an_operator_the_loss_is_right_and_gradients_are_not(control):
    broken, factors, others = CONTROLS[control]
    fun = functools.partial(network, **SHARDED | broken)
    loss, grads = run(fun, 2, False)
    want_loss, want = in_float64(jax.value_and_grad(whole), PARAMS, IDS)
    helpers.assert_close(loss, want_loss, "float32")
    expected = {n: want[n] * factors.get(n, 1) for n in want if n not in others}
    helpers.assert_close({n: grads[n] for n in expected}, expected, "float32")
    for n in others:
        assert np.abs(grads[n] - want[n]).max() > 0.02 * np.abs(want[n]).max(), n


def textbook(forward, backward):
    fun = jax.custom_vjp(forward)
    fun.defvjp(lambda x: (forward(x), None), lambda _, ct: (backward(ct),))
    return fun


def same(x):
    return x


def psum(x):
    return jax.lax.psum(x, "mp")


def test_t3_typed_a_textbook_f_doubles_what_is_upstream_silently():
    """T3: its rule sums what the type system has summed already."""
    f = textbook(same, psum)
    columns = {"columns": lambda x, w, b: dense(f(x), w, b)}
    loss, grads = run(functools.partial(network, **SHARDED | columns), 2, True)
    want_loss, want = in_float64(jax.value_and_grad(whole), PARAMS, IDS)
    helpers.assert_close(loss, want_loss, "float32")
    helpers.assert_close(grads["scale"], 2 * want["scale"], "float32")
    helpers.assert_close(grads["up"], want["up"], "float32")


def test_t4_typed_a_textbook_g_is_a_type_error():
    """T4: the cotangent of what varies has to vary."""
    g = textbook(psum, same)
    rows = {"rows": lambda x, w, b: g(x @ w) + b[None, None]}
    with pytest.raises((TypeError, ValueError), match=r"(?s)varying|manual"):
        run(functools.partial(network, **SHARDED | rows), 2, True)


# The right loss is 7.34: a product of 6.12, and a bias that adds 1.22.
ROW_ARGS = np.float32([[1, 2]]), np.float32([[1.12, 1], [1, 1]]), np.float32([0.5, 0.72])
ROW_LAYERS = {
    "row_dense": (lambda x, w, b: row_dense(x, w, b, "mp"), 7.34, [1, 1]),
    "bias before the sum (T9)": (lambda x, w, b: reduce_from(x @ w + b[None], "mp"), 8.56, [1, 1]),
    "a part of the bias (T10)": (
        lambda x, w, b: reduce_from(x @ w + b[None] / 2, "mp"),
        7.34,
        [0.5, 0.5],
    ),
}


@pytest.mark.parametrize("name", ROW_LAYERS)
def test_t9_t10_the_row_bias_counts_once_in_the_loss_and_in_its_gradient(name):
    layer, want_loss, want_grad = ROW_LAYERS[name]
    fun = jax.value_and_grad(lambda x, w, b: layer(x, w, b).sum(), argnums=2)
    loss, grad = jit(sharded(fun, (P(None, "mp"), P("mp"), P()), P()))(*ROW_ARGS)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-6)
