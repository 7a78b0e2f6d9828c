"""Equations that a loss repeats: the same program, with the derivative of each worked out once."""

import collections
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

import gradaccum
from gradaccum import _repeated

WIDTH = 4
# Before jax 0.10.2 every equation is in a context of its own, and nothing is shared.
shares = pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="shared from jax 0.10.2 on")


def deep(layers):
    """Params, batch and a loss whose equal layers are written out, each in its own scope."""
    params = [jnp.asarray(helpers.normal(i, WIDTH, WIDTH), np.float32) for i in range(layers)]

    def loss(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = x + jnp.where(jnp.isfinite(x), jnp.tanh(x @ w) * 0.5, x.max(-1, keepdims=True))
        return jnp.mean(x**2)

    return loss, params, jnp.asarray(helpers.normal(99, 8, WIDTH), np.float32)


def calls(program):
    """Returns the programs that a program's jits call, each as often as it is called."""
    found = [e.params["jaxpr"] for e in program.eqns if e.primitive.name in ("jit", "pjit")]
    return collections.Counter(map(id, found))


@shares
def test_equal_layers_call_the_same_programs():
    counts = {}
    for layers in (3, 6):
        loss, *args = deep(layers)
        program = jax.make_jaxpr(loss)(*args)
        counts[layers] = calls(_repeated.share_repeated(program))
    assert len(counts[3]) == len(counts[6]) >= 6
    assert sum(counts[6].values()) == 2 * sum(counts[3].values())


def test_traced_again_it_is_the_program_that_it_was():
    loss, *args = deep(3)
    program = jax.make_jaxpr(loss)(*args)
    again = jex_core.jaxpr_as_fun(_repeated.share_repeated(program))
    assert str(jax.make_jaxpr(again)(*jax.tree.leaves(args))) == str(program)


def test_only_what_is_equal_is_shared():
    def fun(x, y):
        rows, columns = x.max(0), x.max(1)  # another axis
        wide = y.max(0)  # another shape
        narrow = x.astype(jnp.bfloat16).max(0)  # another dtype
        return rows, columns, wide, narrow, jax.lax.sin(x), jax.lax.cos(x)

    program = jax.make_jaxpr(fun)(jnp.ones((3, 3)), jnp.ones((3, 5)))
    assert not calls(_repeated.share_repeated(program))


def test_what_has_an_effect_or_no_operand_is_left():
    def fun(x):
        ref = jax.new_ref(x)
        for _ in range(3):
            x = x + ref[...] + jax.lax.iota(jnp.float32, 3)
        return x

    program = jax.make_jaxpr(fun)(jnp.ones(3))
    left = collections.Counter(e.primitive.name for e in _repeated.share_repeated(program).eqns)
    assert left["iota"] == left["get"] == 3


@shares
def test_an_equation_of_another_context_keeps_it():
    def fun(x):
        with jax.numpy_dtype_promotion("standard"), jax.threefry_partitionable(False):
            x = jnp.sin(jnp.sin(x))
        return jnp.cos(jnp.cos(x))

    with jax.threefry_partitionable(True):
        program = _repeated.share_repeated(jax.make_jaxpr(fun)(1.0))
    assert [e.primitive.name == "sin" for e in program.eqns] == [True, True, False, False]


def scopes(fun, *args):
    """Returns the scopes of layers that operations are in, and the lines of `deep` they are of."""
    text = jax.jit(jax.value_and_grad(fun)).lower(*args).as_text(debug_info=True)
    found = {tuple(re.findall(r"layer_\d", x)) for x in re.findall(r'loc\("([^"]+)"', text)}
    lines = set(map(int, re.findall(rf'"{re.escape(__file__)}":(\d+)', text)))
    first = deep.__code__.co_firstlineno
    return found, {line - first for line in lines if first < line < first + 12}


def test_each_layer_keeps_its_own_scope_and_lines():
    loss, *args = deep(3)
    want, lines = scopes(loss, *args)
    assert want == {(), ("layer_0",), ("layer_1",), ("layer_2",)}
    assert len(lines) > 1
    fun = gradaccum.accumulate(loss, microbatches=2, axis_name=None)
    assert scopes(fun, *args) == (want, lines)


@pytest.mark.parametrize("n", [1, 4])
def test_gradients_equal_those_of_one_batch(n):
    loss, params, x = deep(5)
    fun = gradaccum.accumulate(loss, microbatches=2, mesh=helpers.data_mesh(n))
    got = jax.jit(jax.value_and_grad(fun))(params, x)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), np.float64), (params, x))
        want = jax.value_and_grad(loss)(*wide)
    helpers.assert_close(got, want)
