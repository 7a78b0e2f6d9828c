"""`audit.assert_one_reduction` on real programs: each way to reduce too often, caught."""

import functools
import inspect
import re

import jax
import jax.flatten_util
import jax.numpy as jnp
import pytest
from audit_fixtures.programs import GRAD, D, arguments, compiled, loss, mesh_of, program, shaped
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradaccum import audit


def assert_caught(step, reason, axis_name="dp", **options):
    """Assert that a program fails for `reason`, with the table in the message."""
    made = program(step, mesh_of(dp=8)) if inspect.isfunction(step) else step
    with pytest.raises(AssertionError, match=reason) as info:
        audit.assert_one_reduction(made, axis_name=axis_name, **options)
    message = str(info.value)
    assert message.startswith("audit.assert_one_reduction: ")
    assert message.endswith(str(audit.collectives(made)))
    return message


def naive_step(mesh, k=64, layers=16, batch=512):
    """The first seed's loop shape under plain jit: microbatches, each through a layer scan."""

    def model_loss(params, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (h + h @ w, None), x, params)[0])

    def step(params, x):
        x = x.reshape(k, batch // k, D)
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "dp")))

        def body(carry, microbatch):
            value, grads = jax.value_and_grad(model_loss)(params, microbatch)
            return (carry[0] + value, carry[1] + grads), None

        return jax.lax.scan(body, (jnp.zeros(()), jnp.zeros_like(params)), x)[0]

    args = shaped((layers, D, D), mesh), shaped((batch, D), mesh, "dp")
    return compiled(step, *args)


def test_the_naive_jit_step_reduces_in_both_loops():
    message = assert_caught(
        naive_step(mesh_of(dp=8)), r"over dp .* runs 64 x 16 = 1,024 times a call"
    )
    assert re.search(r"also: .* of f32\[\] over dp .* runs 64 times a call, in a loop", message)
    # 1,024 gradients of one layer, 64 losses, and one reshape of the batch.
    assert f"total over dp: executions {1_024 + 64 + 1:,}, bytes" in message


def test_the_count_follows_the_loops():
    assert_caught(
        naive_step(mesh_of(dp=8), k=4, layers=3, batch=32), r"runs 4 x 3 = 12 times a call"
    )


@pytest.mark.parametrize("k", [2, 64], ids="k={}".format)
def test_one_reduction_after_the_loop_passes(k):
    def step(params, x):
        def body(carry, rows):
            value, grads = jax.value_and_grad(loss)(params, rows)
            return jax.tree.map(jnp.add, carry, (value, grads)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.pmean(jax.lax.scan(body, zero, x.reshape(k, -1, D))[0], "dp")

    made = program(step, mesh_of(dp=8), rows=8 * k)
    audit.assert_one_reduction(made, axis_name="dp")
    (row,) = audit.collectives(made)
    assert (row.kind, row.axes, row.executions) == ("all-reduce", ("dp",), 1)
    assert row.bytes == 4 * (1 + 2 * (D * D + D))  # the loss rides along


@pytest.mark.parametrize("chained", [False, True], ids=["one psum", "psum after psum"])
def test_v22_two_data_axes_pass_with_each_byte_once_per_axis(chained):
    def step(params, x):
        grads = GRAD(params, x)
        if chained:
            return jax.lax.psum(jax.lax.psum(grads, "r"), "dp")
        return jax.lax.psum(grads, ("r", "dp"))

    made = program(step, mesh_of(r=2, dp=4), ("r", "dp"))
    audit.assert_one_reduction(made, axis_name=("r", "dp"))
    assert len(audit.collectives(made)) == 1 + chained


def test_a_model_axis_may_communicate_in_the_loop():
    mesh = mesh_of(dp=4, mp=2)

    def step(params, x):
        def body(carry, rows):
            value, grads = jax.value_and_grad(loss)(params, jax.lax.psum(rows, "mp"))
            return jax.tree.map(jnp.add, carry, (value, grads)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.pmean(jax.lax.scan(body, zero, x.reshape(4, -1, D))[0], "dp")

    made = program(step, mesh)
    audit.assert_one_reduction(made, axis_name="dp")
    report = audit.collectives(made)
    assert [row.executions for row in report.over("mp")] == [4]
    # The same program is wrong if mp is called a data axis.
    assert_caught(made, r"over mp .* runs 4 times a call", axis_name=("dp", "mp"))


def test_a_reduction_in_a_fori_loop_is_caught():
    def step(params, x):
        def body(_, p):
            return jax.tree.map(jnp.add, p, jax.lax.psum(GRAD(p, x), "dp"))

        return jax.lax.fori_loop(0, 5, body, params)

    assert_caught(step, r"runs 5 times a call, in a loop; required: once, in no loop")


def test_an_unknown_trip_count_is_not_taken_for_one():
    def step(params, x):
        def unfinished(carry):
            return jnp.abs(carry[0][1]).sum() > 0.1

        def body(carry):
            return jax.tree.map(jnp.add, carry, jax.lax.psum(GRAD(carry, x), "dp"))

        return jax.lax.while_loop(lambda c: unfinished(c), body, params)

    made = program(step, mesh_of(dp=8))
    message = assert_caught(made, r"runs an unknown number of times a call \(\?\): in a loop")
    assert message.endswith("total over dp: executions ?, bytes ?, sent by each device ?")
    rows = audit.collectives(made)
    assert {row.executions for row in rows} == {None}
    assert {row.loops for row in rows} == {(None,)}


def test_an_unknown_loop_over_a_model_axis_alone_is_no_data_axis_matter():
    def step(params, x):
        x = jax.lax.while_loop(lambda c: c.sum() > 1, lambda c: jax.lax.psum(c, "mp") / 3, x)
        return jax.lax.psum(GRAD(params, x), "dp")

    made = program(step, mesh_of(dp=4, mp=2))
    audit.assert_one_reduction(made, axis_name="dp")


def twice_in_a_row(grads):
    return jax.lax.pmean(jax.lax.pmean(grads, "dp"), "dp")


def in_two_dtypes(grads):
    return jax.lax.psum(grads, "dp"), jax.lax.psum(
        jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads), "dp"
    )


def scaled_again(grads):
    return jax.lax.psum(grads, "dp"), jax.lax.psum(jax.tree.map(lambda g: 3 * g, grads), "dp")


def raveled_and_by_leaf(grads):
    flat, _ = jax.flatten_util.ravel_pytree(grads)
    return jax.lax.psum(flat, "dp"), jax.lax.psum(grads[0], "dp")


def one_slice_twice(grads):
    part = grads[0][0][:4]
    return jax.lax.psum(grads, "dp")[1], jax.lax.psum(part, "dp"), jax.lax.psum(part * 2, "dp")


@pytest.mark.parametrize(
    "reduce",
    [twice_in_a_row, in_two_dtypes, scaled_again, raveled_and_by_leaf, one_slice_twice],
    ids=lambda f: f.__name__,
)
def test_the_same_bytes_reduced_twice_are_caught(reduce):
    assert_caught(
        lambda p, x: reduce(GRAD(p, x)), r"the same bytes are reduced twice over dp: operand"
    )


@pytest.mark.parametrize(
    ("axes", "shared"), [([("r", "dp"), "dp"], "dp"), (["r", "dp", "r"], "r")], ids=str
)
def test_twice_over_one_of_two_axes_is_caught_by_its_name(axes, shared):
    def step(params, x):
        grads = GRAD(params, x)
        for axis in axes:
            grads = jax.lax.psum(grads, axis)
        return grads

    made = program(step, mesh_of(r=2, dp=4), ("r", "dp"))
    reason = rf"the same bytes are reduced twice over {shared}: operand"
    assert_caught(made, reason, axis_name=("r", "dp"))


@pytest.mark.parametrize("style", ["jit", "shard_map"])
def test_microbatches_reduced_one_by_one_are_caught(style):
    mesh = mesh_of(dp=8)

    def step(params, x):
        parts = [GRAD(params, rows) for rows in x]
        if style == "shard_map":
            parts = [jax.lax.psum(part, "dp") for part in parts]
        return jax.tree.map(lambda *leaves: functools.reduce(jnp.add, leaves), *parts)

    if style == "jit":
        made = compiled(step, *arguments(mesh, None, "dp"))
    else:
        made = program(step, mesh, None, "dp")
    assert_caught(made, r"two reductions over dp are added to each other: result \d+ of .* and res")
    # The negative control: summed first, the four parts are one tree.
    summed = program(lambda p, x: jax.lax.psum(GRAD(p, x.reshape(-1, D)), "dp"), mesh, None, "dp")
    audit.assert_one_reduction(summed, axis_name="dp")


def gathered_sum(g):
    return jax.lax.all_gather(g, "dp").sum(0)


def gathered_rows(g):
    return jax.lax.all_gather(g, "dp", tiled=True).reshape(8, *g.shape).mean(0)


def gathered_python_sum(g):
    return sum(list(jax.lax.all_gather(g, "dp")))


def gathered_scan(g):
    rows = jax.lax.all_gather(g, "dp")
    return jax.lax.scan(lambda acc, row: (acc + row, None), jnp.zeros_like(g), rows)[0]


@pytest.mark.parametrize(
    "total",
    [gathered_sum, gathered_rows, gathered_python_sum, gathered_scan],
    ids=lambda f: f.__name__,
)
def test_an_all_gather_followed_by_a_local_sum_is_caught(total):
    def step(params, x):
        grads = GRAD(params, x)
        # One leaf is reduced as it should be, so that it is not the lack of a psum that fails.
        return total(grads[0][0]), jax.lax.psum(grads[1], "dp")

    size = 4 * D * D
    assert_caught(
        step,
        rf"all-gather .* over dp .* gathers {8 * size:,} bytes that every device then sums by "
        rf"itself; required: one reduction \(psum, psum_scatter\) of {size:,} bytes",
    )


def test_a_gather_of_activations_for_one_big_product_is_caught():
    def step(params, x):
        hidden = jnp.tanh(x @ params[0][0])
        rows, cotangents = (jax.lax.all_gather(a, "dp", tiled=True) for a in (hidden, hidden - x))
        return rows.T @ cotangents, jax.lax.psum(GRAD(params, x), "dp")

    assert_caught(step, r"gathers 4,096 bytes that every device then sums by itself")


def in_a_branch(i, params, x):
    return jax.lax.cond(
        i > 3,
        lambda g: jax.lax.psum(g, "dp"),
        lambda g: jax.tree.map(jnp.zeros_like, g),
        GRAD(params, x),
    )


def test_a_reduction_in_a_branch_is_reported_and_allowed_only_on_request():
    mesh = mesh_of(dp=8)
    specs = P(), P(), P("dp")
    f = jax.shard_map(in_a_branch, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    made = compiled(f, shaped((), mesh, dtype=jnp.int32), *arguments(mesh, "dp"))
    message = assert_caught(made, r"over dp .* stands in a branch of a conditional; required: outs")
    assert re.search(r"all-reduce +dp +f32 +4 +2,176 +1 +yes ", message)
    assert [row.conditional for row in audit.collectives(made)] == [True]
    audit.assert_one_reduction(made, axis_name="dp", conditional=True)


def test_the_loss_alone_is_no_gradient():
    def step(params, x):
        return jax.lax.pmean(loss(params, x), "dp"), jax.tree.map(
            lambda g: g[None], GRAD(params, x)
        )

    mesh = mesh_of(dp=8)
    assert_caught(
        program(step, mesh, out=(P(), P("dp"))),
        r"no gradient is reduced over dp=8: of 1 operations over it, none sums an array of more "
        r"than one element \(beside 4 bytes of scalars\)",
    )
