"""Collectives on differentiated paths: each construct in its reported and unreported form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activity_programs import (
    M,
    apart,
    batched,
    gather,
    manual,
    nested,
    primitives,
    psum,
    reduce_from,
    ref_in_scan,
    repeat,
    report,
    scan,
    solved,
    straight_through,
    sum_into_ref,
    sum_the_late,
    summed,
    switch,
    through_ref,
    use_late,
)
from jax import lax

from gradaccum._activity import differentiated_collectives

REPORTED = {
    "psum": lambda w, x: psum(w * x).sum(),
    "pmean of the loss": lambda w, x: lax.pmean((w * x).sum(), "mp"),
    "psum of a tree": lambda w, x: psum({"a": x, "b": w})["b"].sum(),
    "psum over two axes": lambda w, x: lax.psum(w, ("dp", "mp")).sum(),
    "psum of complex values": lambda w, x: psum(w + 1j * x).real.sum(),
    "beside aux": lambda w, x: ((s := psum(w)).sum(), s),
    "jit": lambda w, x: jax.jit(psum)(w).sum(),
    "remat": lambda w, x: jax.checkpoint(psum)(w).sum(),
    "nested shard_map": lambda w, x: nested(psum)(w).sum(),
    "vmap": lambda w, x: jax.vmap(psum)(w).sum(),
    "inside custom_jvp": lambda w, x: summed(w).sum(),
    "after relu": lambda w, x: psum(jax.nn.relu(w)).sum(),
    "after a straight-through estimator": lambda w, x: psum(straight_through(w)).sum(),
    "before a straight-through estimator": lambda w, x: straight_through(psum(w)).sum(),
    "after custom_vjp": lambda w, x: psum(reduce_from(w)).sum(),
    "before custom_vjp": lambda w, x: reduce_from(psum(w)).sum(),
    "optimization_barrier": lambda w, x: psum(lax.optimization_barrier((x, w))[1]).sum(),
    "scan: xs": lambda w, x: scan(lambda c, v: (c + psum(v), None), 0.0, w)[0],
    "scan: constant": lambda w, x: scan(lambda c, v: (c + psum(w[0] * v), None), 0.0, x)[0],
    "scan: carry": lambda w, x: scan(lambda c, v: (psum(c) * v, None), w, x)[0].sum(),
    "scan: ys": lambda w, x: scan(lambda c, v: (c, psum(v)), 0.0, w)[1].sum(),
    "scan: ys that are xs": lambda w, x: psum(scan(lambda c, v: (c, v), 0.0, w)[1]).sum(),
    "scan: reverse": lambda w, x: scan(lambda c, v: (c, psum(v)), 0.0, w, reverse=True)[1].sum(),
    "scan: all kinds of values": lambda w, x: scan(
        lambda c, v: ((c[0] + 1, psum(c[1] * v[0]) + x, c[2]), (v[1], c[2], x)),
        *((0, w, x), (x, jnp.arange(4))),
    )[0][1].sum(),
    "scan: active from the second iteration": lambda w, x: scan(sum_the_late, (x, w, 0.0), None)[0][
        2
    ],
    "scan: live two iterations later": lambda w, x: scan(use_late, (w, x, 0.0), x)[0][2],
    "fori_loop": lambda w, x: lax.fori_loop(0, 3, lambda _, c: psum(c * x), w).sum(),
    "while: constant": lambda w, x: repeat(lambda c: (c + psum(w),), x)[0].sum(),
    "while: active from the second iteration": lambda w, x: repeat(
        lambda late, early, total: (early, early, total + psum(late)), x, w, x
    )[2].sum(),
    "cond": lambda w, x: switch(x, jnp.sum, lambda v: psum(v).sum())(w),
    "after cond": lambda w, x: psum(switch(x, jnp.sin, jnp.zeros_like)(w)).sum(),
    "before cond": lambda w, x: switch(x, jnp.zeros_like, jnp.sin)(psum(w)).sum(),
    "ref": lambda w, x: through_ref(w, psum).sum(),
    "into a ref": lambda w, x: through_ref(psum(w), jnp.sin).sum(),
    "ref in a scan, read first": lambda w, x: ref_in_scan(x, w, psum),
    "after a ref in a scan, read first": lambda w, x: psum(ref_in_scan(x, w, jnp.sin)),
    "into a ref in a scan": lambda w, x: sum_into_ref(w, lambda ref, _: ref[...].sum()),
    "custom_vmap": lambda w, x: batched(w).sum(),
    "custom_linear_solve": lambda w, x: solved(w, x).sum(),
    "after custom_linear_solve": lambda w, x: psum(
        lax.custom_linear_solve(lambda v: 2 * v, w, lambda _, b: b / 2)
    ).sum(),
    "monoid reduction": lambda w, x: psum(lax.reduce(w, 1.0, lambda a, b: a * b, [0])),
}

UNREPORTED = {
    "psum of data": lambda w, x: (w * psum(x)).sum(),
    "psum of ones": lambda w, x: w.sum() / psum(jnp.ones(())),
    "psum of a mask": lambda w, x: w.sum() / psum((w > 0).astype(jnp.float32).sum()),
    "psum of integers": lambda w, x: w.sum() * psum(w.astype(jnp.int32)).sum(),
    "psum of an argmax": lambda w, x: w.sum() * psum(jnp.argmax(w).astype(jnp.float32)),
    "pmean of data": lambda w, x: (w * lax.pmean(x, "mp")).sum(),
    "psum of a tree": lambda w, x: (w * psum({"a": x, "b": w})["a"]).sum(),
    "psum over the other axis": lambda w, x: lax.psum(w, "dp").sum(),
    "psum over a vmapped axis": lambda w, x: jax.vmap(lambda v: lax.psum(v, "i"), axis_name="i")(
        w
    ).sum(),
    "result unused": lambda w, x: (psum(w), w.sum())[1],
    "result to aux": lambda w, x: (w.sum(), psum(w)),
    "of stop_gradient": lambda w, x: (w * psum(lax.stop_gradient(w))).sum(),
    "stop_gradient of the result": lambda w, x: (w * lax.stop_gradient(psum(w))).sum(),
    "of floor": lambda w, x: (w * psum(jnp.floor(w))).sum(),
    "sign of the result": lambda w, x: (w * jnp.sign(psum(w))).sum(),
    "comparison of the result": lambda w, x: jnp.where(psum(w) > 0, w, -w).sum(),
    "ppermute": lambda w, x: lax.ppermute(w, "mp", [(0, 1), (1, 0)]).sum(),
    "all_to_all": lambda w, x: lax.all_to_all(w, "mp", 0, 0, tiled=True).sum(),
    "psum_scatter": lambda w, x: lax.psum_scatter(w, "mp", tiled=True).sum(),
    "pmax, pmin": lambda w, x: (lax.pmax(w, "mp") - lax.pmin(w, "mp")).sum(),
    "jit": lambda w, x: (w * jax.jit(psum)(x)).sum(),
    "remat": lambda w, x: jax.checkpoint(lambda w, x: w * psum(x))(w, x).sum(),
    "nested shard_map": lambda w, x: (w * nested(psum)(x)).sum(),
    "custom_jvp": lambda w, x: (w * summed(x)).sum(),
    "custom_vjp": lambda w, x: reduce_from(w * x).sum(),
    "custom_vjp in a scan": lambda w, x: scan(lambda c, v: (c, reduce_from(v)), 0.0, w)[1].sum(),
    "linear_call": lambda w, x: jax.custom_derivatives.linear_call(
        lambda _, v: psum(v), lambda _, g: g, (), w
    ).sum(),
    "custom_vmap": lambda w, x: (w * batched(x)).sum(),
    "custom_linear_solve": lambda w, x: (w * solved(x, x)).sum(),
    "optimization_barrier": lambda w, x: (w * psum(lax.optimization_barrier((x, w))[0])).sum(),
    "scan: ys to aux": lambda w, x: scan(lambda c, v: (c + v, psum(c)), 0.0, w),
    "scan: carry to aux": lambda w, x: scan(
        lambda c, v: ((c[0] + v, psum(c[1] + v)), None), (0.0, 0.0), w
    )[0],
    "scan: of data": lambda w, x: scan(lambda c, v: (c + w * psum(v), None), x, x)[0].sum(),
    "scan: never active": lambda w, x: scan(sum_the_late, (x, x, w.sum()), None)[0][2],
    "while: of data": lambda w, x: (w * repeat(lambda c: (psum(c),), x)[0]).sum(),
    "while: condition": lambda w, x: lax.while_loop(
        lambda c: psum(c).sum() < 9, lambda c: c * 2, w
    ).sum(),
    "cond: of data": lambda w, x: (w * switch(x, jnp.sin, psum)(x)).sum(),
    "cond: predicate": lambda w, x: switch(psum(w), jnp.sin, jnp.cos)(w).sum(),
    "cond: another operand": lambda w, x: (
        switch(x, lambda a, b: (a, psum(b)), lambda a, b: (psum(a), b))(x, w)[0].sum() + w.sum()
    ),
    "ref": lambda w, x: (w * through_ref(x, psum)).sum(),
    "into a ref, to aux": lambda w, x: (w.sum(), through_ref(psum(w), jnp.sin)),
    "ref in a scan": lambda w, x: w.sum() + ref_in_scan(x, x, psum),
    "into a ref in a scan, to aux": lambda w, x: sum_into_ref(
        w, lambda ref, other: (other[...].sum(), ref[...])
    ),
    "apart in jit": apart(jax.jit),
    "apart in remat": apart(jax.checkpoint),
    "apart in nested shard_map": apart(nested),
    "apart in scan": apart(lambda f: lambda w, x: scan(lambda c, v: (c, f(w, v)), 0.0, x)[1]),
    "apart in while": apart(lambda f: lambda w, x: repeat(f, w, x)),
    "apart in cond": apart(lambda f: lambda w, x: switch(x, f, f)(w, x)),
}


@pytest.mark.parametrize("name", REPORTED)
def test_reported(name):
    assert primitives(REPORTED[name]) == ["psum"]


@pytest.mark.parametrize("name", UNREPORTED)
def test_unreported(name):
    assert primitives(UNREPORTED[name]) == []


def test_all_gather():
    assert primitives(lambda w, x: gather(jnp.tanh(w * x)).sum()) == ["all_gather"]
    assert primitives(lambda w, x: (w * gather(x)[:4]).sum()) == []


def test_rows():
    """One for each equation, in program order, with all its axes and the user's line."""

    def loss(w, x):
        double = jax.jit(lambda v: lax.psum(v, ("dp", "mp")) + x)
        h = lax.psum(double(w), "dp")
        return psum(gather(h)).sum() + double(x).sum()

    rows = report(loss)
    assert [row[:2] for row in rows] == [
        ("psum", ("dp", "mp")),
        ("all_gather", ("mp",)),
        ("psum", ("mp",)),
    ]
    line = loss.__code__.co_firstlineno + 1
    assert f"test_activity.py:{line}" in rows[0].source
    assert all("activity_programs.py:" in row.source for row in rows[1:])


def test_axes_and_primitives_asked_for():
    def loss(w, x):
        return lax.psum_scatter(lax.psum(psum(w), "dp"), "mp", tiled=True).sum()

    assert [row.axes for row in report(loss, axis_names=("dp",))] == [("dp",)]
    assert [row.axes for row in report(loss, axis_names=("dp", "mp"))] == [("mp",), ("dp",)]
    vmapped = jax.vmap(lambda v: lax.psum(v, ("i", "mp")), axis_name="i")
    assert [row.axes for row in report(lambda w, x: vmapped(w).sum())] == [("mp",)]
    assert primitives(loss, names=("reduce_scatter",)) == ["reduce_scatter"]


def test_each_call_of_a_function_counts_by_itself():
    """One traced function, called with data and with parameters."""
    f = jax.jit(psum)
    assert primitives(lambda w, x: f(w).sum() + f(x).sum()) == ["psum"]
    assert primitives(lambda w, x: f(w).sum() + f(w * x).sum()) == ["psum", "psum"]


def test_which_inputs_and_outputs():
    rows = []

    def local(w, x):
        jaxpr = jax.make_jaxpr(lambda w, x: (psum(w).sum(), gather(x).sum()))(w, x)
        for active in ([True, False], [False, True]):
            for live in ([True, False], [False, True]):
                rows.append(differentiated_collectives(jaxpr, active, live, {"mp"}))
        return w

    jax.eval_shape(manual(local), jnp.ones(8), jnp.ones(8))
    assert [[row.primitive for row in r] for r in rows] == [["psum"], [], [], ["all_gather"]]


def square_sum(v):
    return (v * v).sum()


# Losses of a vector w that is split over the devices, equal on all of them, and the same without
# a mesh.
TWINS = {
    "psum": (lambda w: psum(square_sum(w)), square_sum),
    "pmean": (lambda w: lax.pmean(square_sum(w), "mp"), lambda w: square_sum(w) / M),
    "all_gather": (lambda w: square_sum(gather(w)), square_sum),
    "in a scan": (lambda w: scan(lambda c, v: (c + psum(v * v), None), 0.0, w)[0], square_sum),
    "in a cond": (
        lambda w: lax.cond(psum(jnp.ones(())) > 1, psum, jnp.sin, square_sum(w)),
        square_sum,
    ),
    "in remat": (jax.checkpoint(lambda w: psum(square_sum(w))), square_sum),
    "in a custom_jvp": (lambda w: summed(square_sum(w)), square_sum),
    "in a custom_vjp": (lambda w: reduce_from(square_sum(w)), square_sum),
    "of stop_gradient": (
        lambda w: reduce_from(square_sum(w)) / psum(lax.stop_gradient(square_sum(w))),
        lambda w: square_sum(w) / lax.stop_gradient(square_sum(w)),
    ),
    "count": (
        lambda w: reduce_from(square_sum(w)) / psum((w > 2).sum()),
        lambda w: square_sum(w) / 6,
    ),
    "ppermute": (
        lambda w: reduce_from((w * lax.ppermute(w, "mp", [(0, 1), (1, 0)])).sum()),
        lambda w: (w * jnp.roll(w, 4)).sum(),
    ),
    "psum_scatter": (
        lambda w: reduce_from(square_sum(lax.psum_scatter(w, "mp", tiled=True))),
        lambda w: square_sum(w[:4] + w[4:]),
    ),
    "all_to_all": (
        lambda w: reduce_from((w * lax.all_to_all(w, "mp", 0, 0, tiled=True)).sum()),
        lambda w: (w * w.reshape(2, 2, 2).swapaxes(0, 1).reshape(8)).sum(),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_the_report_agrees_with_the_gradients(name):
    """What is reported makes the gradients too large by the axis size; all else is right."""
    sharded, plain = TWINS[name]
    w = jnp.arange(1.0, 9.0)
    got = manual(jax.grad(sharded))(w)
    factor = M if report(lambda w, _: sharded(w)) else 1
    np.testing.assert_allclose(got, factor * jax.grad(plain)(w), rtol=1e-6)
