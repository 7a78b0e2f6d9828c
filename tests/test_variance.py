"""What differs over a manual axis: values of all kinds, and losses; the rows of a report."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from variance_operators import f, g, index, none
from variance_programs import of_params, once, penalty, two_layers
from variance_verdicts import NONE, manual, verdict

from gradaccum._variance import varying_outputs
from gradaccum.tensor_parallel import gather_from, scatter_to

LOSS_VARIES = {
    "no g": two_layers(g=none),
    "local regulariser": lambda p, x: two_layers()(p, x) + jnp.square(p["local"]).sum(),
    "of an index": lambda p, x: x.sum() * index(),
    "gradient penalty": penalty(none),
    "scattered": lambda p, x: scatter_to(p["bias"], "mp").sum(),
}


@pytest.mark.parametrize("name", LOSS_VARIES)
def test_losses_that_vary(name):
    assert verdict(LOSS_VARIES[name], P())[0]


def loop(condition, carry):
    """Returns what a loop carries: a count, a product of indices, and both together."""
    body = lambda c: (c[0] + 1, c[1] * (1 + index()), c[0] + c[1])  # noqa: E731
    return lax.while_loop(condition, body, carry)


# The values of a vector v that varies and a vector x that does not, and which of them vary.
VALUES = {
    "inputs": (lambda v, x: (v, x, 1.0, jnp.zeros(3)), [True, False, False, False]),
    "integers": (lambda v, x: (v > 0, jnp.argmax(v), jnp.argmax(x)), [True, True, False]),
    "stop_gradient": (lax.stop_gradient, [True, False]),
    "index": (lambda v, x: (index(), x * index(), x[index()]), [True, True, True]),
    "reductions": (
        lambda v, x: [op(v, "mp") for op in (lax.psum, lax.pmean, lax.pmax, lax.all_gather)],
        [False] * 4,
    ),
    "over two axes": (lambda v, x: lax.psum(v, ("dp", "mp")), [False]),
    "over another axis": (lambda v, x: (lax.psum(v, "dp"), lax.axis_index("dp")), [True, False]),
    "psum of a tree": (lambda v, x: lax.psum((v, x), "dp"), [True, False]),
    "exchanges": (
        lambda v, x: (
            lax.ppermute(x, "mp", [(0, 1)]),
            lax.all_to_all(x, "mp", 0, 0, tiled=True),
            lax.psum_scatter(x, "mp", tiled=True),
        ),
        [True] * 3,
    ),
    "operators": (
        lambda v, x: (f(x), g(v), gather_from(v, "mp"), scatter_to(x, "mp"), f(v)),
        [False, False, False, True, True],
    ),
    "calls": (lambda v, x: jax.jit(lambda v, x: (x + 1, v + x, g(v)))(v, x), [False, True, False]),
    "branches": (
        lambda v, x: (
            lax.cond(v[0] > 0, jnp.sin, jnp.cos, x),
            lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
            lax.cond(x[0] > 0, lambda: v, lambda: x),
        ),
        [True, False, True],
    ),
    "scan": (
        lambda v, x: lax.scan(lambda c, s: ((c[1], c[1] + s, c[2]), c[0]), (0.0, 0.0, 0.0), v),
        [True, True, False, True],
    ),
    "scan: one later": (
        lambda v, x: lax.scan(lambda c, s: ((c[1], c[2], s), c[0]), (0.0, 0.0, 0.0), v)[0],
        [True, True, True],
    ),
    "loop": (lambda v, x: loop(lambda c: c[0] < 3, (0, 1, 0)), [False, True, True]),
    "loop's condition": (lambda v, x: loop(lambda c: c[1] < 3, (0, 1, 0)), [True, True, True]),
    "loop's constant": (lambda v, x: loop(lambda c: c[0] < v[0], (0, 1, 0)), [True, True, True]),
    "refs": (
        lambda v, x: (r := jax.new_ref(x), r.__setitem__(0, v[0]), r[...], x)[2:],
        [True, False],
    ),
    "custom_jvp": (lambda v, x: (jax.nn.relu(v), jax.nn.relu(x)), [True, False]),
    "monoid": (lambda v, x: lax.reduce(v, 1.0, lambda a, b: a * b, [0]), [True]),
    # Nothing is claimed of it.
    "solver that sums": (
        lambda v, x: lax.custom_linear_solve(lambda y: lax.psum(v * y, "mp"), x, lambda _, b: b),
        [False],
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_vary(name):
    fun, expected = VALUES[name]
    found = []

    def local(v, x):
        jaxpr = jax.make_jaxpr(fun if name != "stop_gradient" else lambda *a: fun(a))(v, x)
        found.append(varying_outputs(jaxpr, [True, False], "mp"))
        return v

    specs = {"in_specs": (P("mp"), P()), "out_specs": P("mp"), "check_vma": False}
    jax.eval_shape(manual(local, **specs), jnp.ones(4), jnp.ones(2))
    assert found == [expected]


def test_nothing_is_claimed_of_a_rule_that_raises():
    @jax.custom_vjp
    def broken(v):
        return v

    def backward(_, ct):
        raise NotImplementedError

    broken.defvjp(lambda v: (v, None), backward)
    assert verdict(of_params(lambda h, w: once(broken(h), w, none)), P()) == (False, NONE)


def test_rows():
    """One for each equation, in program order, with the user's line."""

    def fun(h, w):
        total = once(f(h), w, none)
        total = total + g((h.sum() * w).sum())
        return total + g(jnp.where(w > 0, h.sum(), w).sum())

    _, (rows, *_) = verdict(of_params(fun), P())
    line = fun.__code__.co_firstlineno
    assert [row.primitive for row in rows] == ["mul", "select_n"]
    assert [f"test_variance.py:{line + i}:" in row.source for i, row in enumerate(rows, 2)]
