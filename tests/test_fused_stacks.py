"""Fused accumulation: what a program can do with a stack, and values among the refs of one scan."""

import jax
import jax.numpy as jnp
import pytest
from fused_programs import (
    L,
    assert_equal_gradients,
    in_place,
    jitted,
    layer,
    make_params,
    pair,
    stack,
)
from jax import lax


def xs_and_constant(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w + h @ p["w"][0]), None), x, p["w"])[0]


def xs_and_whole_constant(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w @ p["w"].sum(0)), None), x, p["w"])[0]


def tied_remat(p, x):
    return jax.checkpoint(lambda x, a, b: stack(stack(x, a), b))(x, p["w"], p["w"])


def positions_static(p, x):
    return stack(x + p["w"][0, :1] + p["vec"][:2].sum(0)[None], p["v"])


def positions_dynamic(p, x):
    at = jnp.argmax(p["w"][0, 0])
    here = lax.dynamic_slice_in_dim(p["vec"], at % 2, 2).sum(0) + p["vec"][at % 3]
    return stack(x + here[None], p["v"])


def in_one_jit_twice(p, x):
    run = jax.jit(stack)
    return run(run(x, p["w"]), p["w"])


def scan_of_the_pair(p, x):
    return lax.scan(lambda h, ab: (layer(layer(h, ab[0]), ab[1]), None), x, (p["w"], p["w"]))[0]


def regularised(p, x):
    return stack(x, p["w"]) + 0.1 * jnp.sum(p["w"] ** 2)


def regularised_by_scan(p, x):
    penalty, _ = lax.scan(lambda c, w: (c + jnp.sum(w**2), None), 0.0, p["w"])
    return stack(x, p["w"]) + 0.1 * penalty


def unrolled_by_hand(p, x):
    for i in range(L):
        x = layer(x, p["w"][i])
    return x


def fori_over_layers(p, x):
    return lax.fori_loop(0, L, lambda i, h: layer(h, p["w"][i]), x)


def mapped_whole(p, x):
    return jnp.tanh(x @ lax.map(lambda w: jnp.sin(w) @ w, p["w"]).sum(0))


def mapped_in_batches(p, x):
    return jnp.tanh(x @ lax.map(lambda w: jnp.sin(w) @ w, p["w"], batch_size=2).sum(0))


def associative(p, x):
    return jnp.tanh(x @ lax.associative_scan(jnp.matmul, p["w"])[-1])


def vmapped_stack(p, x):
    return jax.vmap(lambda row: stack(row[None], p["w"])[0])(x)


def vmapped_over_stack(p, x):
    return jax.vmap(lambda w: layer(x, w))(p["w"]).sum(0)


def branch_on_a_stack(p, x):
    return lax.cond(jnp.sum(p["w"]) > 0, stack, lambda h, w: h @ w[0], x, p["w"])


def scanned_backwards_and_forwards(p, x):
    return stack(stack(x, p["w"]), p["w"], reverse=True)


def sorted_before(p, x):
    return stack(x, p["w"][jnp.array([2, 0, 1])])


def identity_jit_before(p, x):
    same = jax.jit(lambda w: w)(p["w"])
    return lax.scan(lambda h, ab: (h @ jitted(*ab), None), x, (same, p["w"]))[0]


def jit_returns_it_too(p, x):
    h, same = jax.jit(lambda h, w: (stack(h, w), w))(x, p["w"])
    return h @ same[0]


def chained_in_place_then_sliced(p, x):
    return stack(x, p["w"]) @ jax.jit(lambda w: w[0])(p["w"])


def stacks_of_stacks_and_inner_constant(p, x):
    def outer(h, ws):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w @ ws[0]), None), h, ws)[0], None

    return lax.scan(outer, x, p["deep"])[0]


TIED = [
    lambda p, x: pair(x, p["w"], p["w"]),
    xs_and_constant,
    xs_and_whole_constant,
    tied_remat,
    in_one_jit_twice,
    scan_of_the_pair,
    regularised,
    regularised_by_scan,
    unrolled_by_hand,
    fori_over_layers,
    associative,
    vmapped_over_stack,
    scanned_backwards_and_forwards,
    sorted_before,
    identity_jit_before,
    jit_returns_it_too,
    chained_in_place_then_sliced,
]
TIED[0].__name__ = "jit_twice"


@pytest.mark.parametrize("program", TIED, ids=lambda f: f.__name__)
def test_a_stack_with_another_use_goes_by_value(program):
    params = {"w": make_params()["w"]}
    assert_equal_gradients(program, params)
    assert in_place(program, params) == 0


OTHER = [
    positions_static,
    positions_dynamic,
    mapped_whole,
    mapped_in_batches,
    vmapped_stack,
    branch_on_a_stack,
    stacks_of_stacks_and_inner_constant,
]


@pytest.mark.parametrize("program", OTHER, ids=lambda f: f.__name__)
def test_other_uses_of_a_stack(program):
    assert_equal_gradients(program)


# --- Values among the refs of one scan ------------------------------------------------------------


def _two_stacks(x, first, second):
    """The two have equal shapes: cotangents that change places are not noticed otherwise."""

    def layer(h, ab):
        return h + jnp.tanh(h @ ab[0] - 2 * h @ ab[1].T), None

    return lax.scan(layer, x, (first, second))[0]


def _computed(x):
    """A stack that no parameter is, but that depends on one."""
    return jnp.tanh(x)[None] * jnp.ones((L, 1, 1))


AMONG_REFS = {
    "tied_before": lambda p, x: _two_stacks(x, p["v"], p["w"]) + p["v"][0, :1],
    "tied_after": lambda p, x: _two_stacks(x, p["v"], p["w"]) + p["w"][0, :1],
    "tied_before_in_jit": lambda p, x: jax.jit(_two_stacks)(x, p["v"], p["w"]) + p["v"][0, :1],
    "tied_inside_the_jit": lambda p, x: jax.jit(lambda v, w: _two_stacks(x, v, w) + v[0, :1])(
        p["v"], p["w"]
    ),
    "cast_before": lambda p, x: _two_stacks(x, 2 * p["v"], p["w"]),
    "cast_after": lambda p, x: _two_stacks(x, p["v"], 2 * p["w"]),
    "computed_before": lambda p, x: _two_stacks(x, _computed(p["v"][0]), p["w"]),
    "two_scans_one_shared": lambda p, x: _two_stacks(
        _two_stacks(x, p["v"], p["w"]), p["v"], jnp.ones_like(p["w"])
    ),
    "inner_scan_constant": lambda p, x: lax.scan(
        lambda h, w: (
            lax.scan(lambda h, s: (h + jnp.tanh(h * s @ w), None), h, p["v"][0, 0, :2])[0],
            None,
        ),
        x,
        p["w"],
    )[0],
}


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("name", AMONG_REFS)
def test_a_value_among_the_refs_of_one_scan(name, weighted):
    assert_equal_gradients(AMONG_REFS[name], weighted=weighted)


def test_a_narrow_stack_before_a_wide_one():
    """The bfloat16 stack goes by value, so the float32 one beside it does too."""
    params = make_params()
    params = {"v": params["v"].astype(jnp.bfloat16), "w": params["w"]}

    def program(p, x):
        return _two_stacks(x, p["v"].astype(jnp.float32), p["w"])

    def cast_inside(p, x):
        def layer(h, ab):
            return h + jnp.tanh(h @ ab[0].astype(jnp.float32) - 2 * h @ ab[1].T), None

        return lax.scan(layer, x, (p["v"], p["w"]))[0]

    for run in (program, cast_inside):
        assert_equal_gradients(run, params, tolerance="bfloat16")
