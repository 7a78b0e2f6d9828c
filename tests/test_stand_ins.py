"""Stacks that are cast before their scan: added in place, to the values of a sum by value."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import _jaxpr, _stand_ins

LAYERS, WIDTH, ROWS = 3, 8, 32


def weights(dtype=np.float32):
    stacks = {
        "a": helpers.normal(0, LAYERS, WIDTH, WIDTH),
        "b": helpers.normal(1, LAYERS, 1, WIDTH),
    }
    return {name: jnp.asarray(x / 3, dtype) for name, x in stacks.items()}


def batch():
    return jnp.asarray(helpers.normal(2, ROWS, WIDTH), np.float32)


def narrow(tree, dtype=jnp.bfloat16):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def layer(h, p):
    return jnp.tanh(h @ p["a"] + p["b"]).astype(h.dtype), None


def plain(p, x):
    """A cast of all layers, then their scan."""
    h, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), narrow(p))
    return jnp.mean(h.astype(np.float32) ** 2)


def no_cast(p, x):
    h, _ = jax.lax.scan(layer, x.astype(p["a"].dtype), p)
    return jnp.mean(h.astype(np.float32) ** 2)


def half(p, x):
    h, _ = jax.lax.scan(layer, x.astype(jnp.float16), narrow(p, jnp.float16))
    return jnp.mean(h.astype(np.float32) ** 2)


def one_of_two(p, x):
    """The scan takes one stack cast and the other as it is."""
    p = {"a": p["a"].astype(jnp.bfloat16), "b": p["b"]}
    h, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), p)
    return jnp.mean(h.astype(np.float32) ** 2)


def all_of_a_scan(p, x):
    """Constants, two carries, integers among what is scanned, rows, reversed and unrolled."""
    shift = jnp.sin(x.mean())

    def body(carry, xs):
        h, total = carry
        p, i = xs
        h = jnp.tanh(h @ p["a"] + p["b"] + shift.astype(h.dtype) * i.astype(h.dtype))
        return (h, total + i), h.mean()

    start = (jnp.cos(x).astype(jnp.bfloat16), jnp.int32(0))
    xs = (narrow(p), jnp.arange(LAYERS))
    (h, total), means = jax.lax.scan(body, start, xs, reverse=True, unroll=2)
    return jnp.mean(h.astype(np.float32) ** 2) * total + means.astype(np.float32).sum()


def two_scans(p, x):
    h, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), narrow(p["first"]))
    h = jax.jit(jnp.sin)(h.astype(np.float32))
    h, _ = jax.lax.scan(layer, h.astype(jnp.bfloat16), narrow(p["second"]))
    return jnp.mean(h.astype(np.float32) ** 2)


def recomputed(p, x):
    h, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), narrow(p))
    return jnp.mean(h.astype(np.float32) ** 2)


def float32(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def gradients(loss_fn, params, fused=True, mesh=None, **options):
    """Returns what the jitted decorated loss returns, and how many sums are in place."""
    options = {"microbatches": 4, "axis_name": "dp" if mesh else None, "mesh": mesh, **options}
    fun = gradaccum.accumulate(loss_fn, fused=fused, **options)
    grad = jax.jit(jax.value_and_grad(fun))
    return float32(grad(params, batch())), helpers.count_in_place(grad, params, batch())


CASES = {
    "cast": (plain, weights(), 2),
    "bfloat16": (no_cast, weights(jnp.bfloat16), 2),
    "float16": (half, weights(), 2),
    "one-of-two": (one_of_two, weights(), 2),
    "all-of-a-scan": (all_of_a_scan, weights(), 2),
    "two-scans": (two_scans, {"first": weights(), "second": weights()}, 4),
    "recomputed": (recomputed, weights(), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_values_are_those_of_a_sum_by_value(case):
    loss_fn, params, stacks = CASES[case]
    got, in_place = gradients(loss_fn, params)
    want, none = gradients(loss_fn, params, fused=False)
    assert (in_place, none) == (stacks, 0)
    # Not always the bits: where XLA fuses, it may leave out a cast to bfloat16 and back.
    helpers.assert_close(got, want, "bfloat16")
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(got))


@pytest.mark.parametrize(
    "options",
    [
        {"weight_fn": lambda x: (x[:, 0] > 0).sum()},
        {"check_vma": True},
        {"grad_specs": (P("dp"),)},
        {"overlap": True},
        {"reduce_dtype": jnp.bfloat16},
        {"loss_reduction": "sum"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_with_the_options(options):
    params = {
        "a": jnp.asarray(helpers.normal(0, 8, WIDTH, WIDTH) / 3, np.float32),
        "b": jnp.asarray(helpers.normal(1, 8, 1, WIDTH) / 3, np.float32),
    }
    got, in_place = gradients(plain, params, mesh=helpers.data_mesh(8), **options)
    want, _ = gradients(plain, params, fused=False, mesh=helpers.data_mesh(8), **options)
    assert in_place == 2
    helpers.assert_close(got, want, "bfloat16")


def used_twice(p, x):
    return plain(p, x) + jnp.mean(p["a"]) + jnp.mean(p["b"])


def cast_used_twice(p, x):
    p = narrow(p)
    h, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), p)
    h, _ = jax.lax.scan(layer, h, p)
    return jnp.mean(h.astype(np.float32) ** 2)


def constant_of_the_scan(p, x):
    p = narrow(p)

    def body(h, i):
        return layer(h, jax.tree.map(lambda x: x[i], p))

    h, _ = jax.lax.scan(body, x.astype(jnp.bfloat16), jnp.arange(LAYERS))
    return jnp.mean(h.astype(np.float32) ** 2)


def widened(p, x):
    """bfloat16 weights in float32: their gradients are rounded to bfloat16 on the way back."""
    h, _ = jax.lax.scan(layer, x, narrow(p, np.float32))
    return jnp.mean(h**2)


@pytest.mark.parametrize(
    ("loss_fn", "dtype"),
    [
        (used_twice, np.float32),
        (cast_used_twice, np.float32),
        (constant_of_the_scan, np.float32),
        (widened, jnp.bfloat16),
    ],
    ids=["used-twice", "cast-used-twice", "constant", "widened"],
)
def test_what_is_no_such_stack_goes_by_value(loss_fn, dtype):
    params = weights(dtype)
    got, in_place = gradients(loss_fn, params)
    want, _ = gradients(loss_fn, params, fused=False)
    assert in_place == 0
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_scan_that_cannot_be_in_place_gets_no_stand_in():
    """One of its stacks is a batch argument's: all of its gradients go by value."""

    def loss_fn(p, x, stack):
        p = {"a": p["a"].astype(jnp.bfloat16), "b": stack.mean(0).astype(jnp.bfloat16)}
        h, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), p)
        return jnp.mean(h.astype(np.float32) ** 2)

    stack = jnp.asarray(helpers.normal(3, ROWS, LAYERS, 1, WIDTH), np.float32)
    results = []
    for fused in (True, False):
        fun = gradaccum.accumulate(
            loss_fn, microbatches=4, axis_name=None, batch_argnums=(1, 2), fused=fused
        )
        grad = jax.jit(jax.grad(fun, argnums=(0, 2)))
        assert helpers.count_in_place(grad, weights(), batch(), stack) == 0
        results.append(float32(grad(weights(), batch(), stack)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_it_takes_less_memory():
    """No stack of gradients in the cast's dtype (float32 too on CPUs) beside the accumulator."""
    big = {"a": jnp.ones((8, 64, 64)), "b": jnp.ones((8, 1, 64))}
    temporary = {}
    for fused in (True, False):
        fun = gradaccum.accumulate(plain, microbatches=4, axis_name=None, fused=fused)
        compiled = jax.jit(jax.grad(fun)).lower(big, jnp.ones((8, 64))).compile()
        temporary[fused] = compiled.memory_analysis().temp_size_in_bytes / (8 * 64 * 64 * 4)
    assert temporary[True] < temporary[False] - 0.25, temporary


def test_a_program_is_evaluated_as_it_is():
    """Its values whatever the stand-ins hold, and the equations between scans with their names."""
    params = {"first": weights(), "second": weights()}
    leaves, tree = jax.tree.flatten(params)
    program = jax.make_jaxpr(lambda *x: two_scans(jax.tree.unflatten(tree, x[:-1]), x[-1]))(
        *leaves, batch()
    )
    arrays = [*leaves, batch()]
    dtypes = dict.fromkeys(range(4), jnp.dtype(np.float32))
    with_them, found = _stand_ins.with_stand_ins(program, dtypes, arrays)
    assert found == [0, 1, 2, 3]
    anything = [jnp.full(x.shape, np.nan) for x in leaves]
    got = _jaxpr.as_function(with_them)(*arrays, *anything)
    want = _jaxpr.as_function(program)(*arrays)
    np.testing.assert_array_equal(got, want)
    assert _stand_ins.with_stand_ins(program, {}, arrays) == (program, [])
