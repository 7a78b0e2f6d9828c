"""Fused accumulation: what a layer can do with its parameters, and a call that they reach twice."""

import jax.numpy as jnp
import numpy as np
import pytest
from fused_programs import (
    JVP_RULES,
    LAYERS,
    TWICE,
    D,
    L,
    assert_equal_gradients,
    in_place,
    jitted,
    per_layer,
)
from jax import lax


@pytest.mark.parametrize("name", TWICE)
def test_a_layer_that_reaches_a_call_twice(name):
    """The layer's slice of the stack is both operands, inside the scan's body."""

    def program(p, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ TWICE[name](w, w)), None), x, p["w"])[0]

    assert_equal_gradients(program)


@pytest.mark.parametrize("name", TWICE)
def test_a_parameter_that_reaches_a_call_twice(name):
    """Outside of any scan over layers: a whole matrix, and the first of a stack."""

    def program(p, x):
        return jnp.tanh(x @ TWICE[name](p["m"], p["m"])) @ TWICE[name](p["w"][0], p["w"][0])

    rng = np.random.default_rng(2)
    params = {n: jnp.asarray(rng.normal(size=s) / 2, jnp.float32) for n, s in
              {"m": (D, D), "w": (L, D, D)}.items()}  # fmt: skip
    assert_equal_gradients(program, params)
    assert in_place(program, params) == 0


@pytest.mark.parametrize("name", JVP_RULES)
def test_a_rule_that_uses_its_tangent_twice(name):
    """Nothing in the program before differentiation shows it."""
    fun = JVP_RULES[name]
    assert_equal_gradients(
        lambda p, x: lax.scan(lambda h, w: (jnp.tanh(h @ fun(w)), None), x, p["w"])[0]
    )


@pytest.mark.parametrize("name", LAYERS)
def test_a_use_inside_the_layer(name):
    assert_equal_gradients(per_layer(LAYERS[name]))


def test_a_stack_that_is_scanned_but_not_used():
    assert_equal_gradients(per_layer(lambda h, w, unused: jnp.tanh(h @ w), ("w", "v")))


def test_layers_that_are_also_the_outputs_of_their_scan():
    def program(p, x):
        h, ws = lax.scan(lambda h, w: (jnp.tanh(h @ w), (w, w)), x, p["w"])
        return h @ jitted(*(w[0] for w in ws)) @ jitted(ws[0][1], p["w"][1])

    assert_equal_gradients(program)


def test_a_layer_that_becomes_the_carry():
    def program(p, x):
        _, hs = lax.scan(lambda before, w: (w, x @ jitted(before, w)), jnp.eye(D), p["w"])
        return jnp.sum(hs, axis=0)

    assert_equal_gradients(program)
