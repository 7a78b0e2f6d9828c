"""`audit.assert_one_reduction` on the other ways to do one mean, and on the nearly right ones."""

import jax
import jax.numpy as jnp
import pytest
from audit_fixtures import programs
from audit_fixtures.programs import (
    GRAD,
    TREE,
    D,
    arguments,
    compiled,
    loss,
    mesh_of,
    program,
    shaped,
)
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import audit


def fsdp(params, x):
    """Parameter shards gathered, used, and their gradients scattered by the gather's transpose."""

    def gathered_loss(shards):
        full = jax.tree.map(lambda w: jax.lax.all_gather(w, "dp", tiled=True), shards)
        return loss(full, x)

    value, grads = jax.value_and_grad(gathered_loss)(params)
    return jax.lax.pmean(value, "dp"), grads


def zero_step(params, x):
    """ZeRO-2 with a clipped step: scatter, norm of the shards, update, gather."""
    grads = jax.tree.map(lambda g: jax.lax.psum_scatter(g, "dp", tiled=True) / 8, GRAD(params, x))
    norm = jax.lax.psum(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)), "dp") ** 0.5
    at = jax.lax.axis_index("dp")

    def update(w, g):
        shard = jax.lax.dynamic_slice_in_dim(w, at * g.shape[0], g.shape[0])
        return jax.lax.all_gather(shard - 0.1 * g / jnp.maximum(norm, 1.0), "dp", tiled=True)

    return jax.tree.map(update, params, grads)


def int8_mean(params, x):
    """Quantise, exchange, sum, quantise, gather: a reduce-scatter and gather made by hand."""

    def mean(g):
        rows = g.reshape(8, -1)
        scale = jnp.abs(rows).max(-1, keepdims=True) / 127
        q, scale = jnp.round(rows / scale).astype(jnp.int8), scale
        q, scale = (jax.lax.all_to_all(a, "dp", 0, 0) for a in (q, scale))
        total = jnp.sum(q.astype(jnp.float32) * scale, 0)
        top = jnp.abs(total).max() / 127
        q = jax.lax.all_gather(jnp.round(total / top).astype(jnp.int8), "dp")
        return (q.astype(jnp.float32) * jax.lax.all_gather(top, "dp")[:, None]).reshape(g.shape)

    return jax.tree.map(mean, GRAD(params, x))


def powersgd(params, x):
    """Rank 2: the second reduction depends on the first through a product, on other bytes."""

    def mean(g):
        if g.ndim < 2:
            return jax.lax.pmean(g, "dp")
        left = jax.lax.pmean(g @ jnp.eye(D, 2), "dp")
        left = left / jnp.maximum(jnp.linalg.norm(left, axis=0, keepdims=True), 1e-6)
        return left @ jax.lax.pmean(g.T @ left, "dp").T

    return jax.tree.map(mean, GRAD(params, x))


def by_leaf(params, x):
    return jax.tree.map(lambda g: jax.lax.pmean(g, "dp"), GRAD(params, x))


def by_slices(params, x):
    """Parts of one stack, each reduced by itself."""
    grads = GRAD(params, x)[0][0]
    return [jax.lax.psum(grads[i : i + 4], "dp") for i in range(0, D, 4)]


def scattered_then_orthogonalised(params, x):
    """As a sharded Muon does: what is gathered and multiplied has been reduced before."""
    shard = jax.lax.psum_scatter(GRAD(params, x)[0][0], "dp", tiled=True)
    whole = jax.lax.all_gather(shard, "dp", tiled=True)
    return whole @ (whole.T @ whole), whole.reshape(8, -1).sum(0)


def with_row_norms(params, x):
    grads = GRAD(params, x)
    norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    return jax.lax.pmean((grads, norm), "dp")


def in_either_branch(params, x):
    def doubled(grads):
        return jax.tree.map(lambda g: 2 * g, jax.lax.psum(grads, "dp"))

    grads = GRAD(params, x)
    return jax.lax.cond(params[0][1][0] > 0, lambda g: jax.lax.psum(g, "dp"), doubled, grads)


@pytest.mark.parametrize(
    "step",
    [
        zero_step,
        int8_mean,
        powersgd,
        by_leaf,
        by_slices,
        scattered_then_orthogonalised,
        with_row_norms,
    ],
    ids=lambda f: f.__name__,
)
def test_one_mean_made_in_another_way_passes(step):
    audit.assert_one_reduction(program(step, mesh_of(dp=8)), axis_name="dp")


def test_one_row_a_device_is_not_mistaken_for_the_same_bytes():
    # A bias's gradient is then the cotangent itself, with nothing summed.
    audit.assert_one_reduction(program(by_leaf, mesh_of(dp=8), rows=8), axis_name="dp")


def test_what_a_loop_accumulates_is_one_thing_afterwards():
    def step(params, x, again):
        def body(acc, rows):
            return jax.tree.map(jnp.add, acc, GRAD(params, rows)), None

        grads = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), x)[0]
        extra = jax.lax.psum(2 * grads[0][0], "dp") if again else ()
        return jax.lax.psum(grads, "dp"), extra

    mesh = mesh_of(dp=8)
    once, twice = (
        program(lambda p, x, again=again: step(p, x, again), mesh, None, "dp")
        for again in (False, True)
    )
    audit.assert_one_reduction(once, axis_name="dp")
    with pytest.raises(AssertionError, match=r"the same bytes are reduced twice over dp"):
        audit.assert_one_reduction(twice, axis_name="dp")


@pytest.mark.parametrize("first", [True, False], ids=["true branch", "false branch"])
def test_a_reduction_in_a_branch_and_another_after_it_are_two(first):
    def reduced(grads):
        return jax.lax.psum(grads, "dp")

    def step(params, x):
        branches = (reduced, lambda g: g) if first else (lambda g: g, reduced)
        grads = jax.lax.cond(params[0][1][0] > 0, *branches, GRAD(params, x))
        return reduced(grads)

    made = program(step, mesh_of(dp=8))
    with pytest.raises(AssertionError, match=r"the same bytes are reduced twice over dp"):
        audit.assert_one_reduction(made, axis_name="dp", conditional=True)


def test_exclusive_branches_do_not_reduce_twice():
    made = program(in_either_branch, mesh_of(dp=8))
    audit.assert_one_reduction(made, axis_name="dp", conditional=True)


def test_fsdp_gathers_and_scatters_pass():
    mesh = mesh_of(dp=8)
    f = jax.shard_map(
        fsdp, mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=(P(), P("dp")), check_vma=False
    )
    params, x = arguments(mesh, "dp")
    params = jax.tree.map(lambda w: shaped(w.shape, mesh, "dp"), params)
    made = compiled(f, params, x)
    audit.assert_one_reduction(made, axis_name="dp")
    totals = {}
    for row in audit.collectives(made):
        totals[row.kind] = totals.get(row.kind, 0) + row.bytes
    # The gradient tree counts the same gathered and scattered.
    assert totals == {"all-gather": TREE, "reduce-scatter": TREE, "all-reduce": 4}


@pytest.mark.parametrize("spec", [(), ("dp",), (None, "dp")], ids=["replicated", "rows", "columns"])
def test_one_plain_jit_microbatch_passes_however_xla_shards_it(spec):
    mesh = mesh_of(dp=8)
    params, x = arguments(mesh, "dp")
    params = [(shaped((D, D), mesh, *spec), shaped((D,), mesh)) for _ in params]
    audit.assert_one_reduction(compiled(jax.value_and_grad(loss), params, x), axis_name="dp")


def test_two_steps_in_one_call_are_two_reductions():
    def step(params, x):
        for rows in x[:2]:
            grads = jax.lax.pmean(GRAD(params, rows), "dp")
            params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        return params

    made = program(step, mesh_of(dp=8), None, "dp")
    with pytest.raises(AssertionError, match=r"two reductions over dp are added to each other"):
        audit.assert_one_reduction(made, axis_name="dp")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by value"])
def test_the_decorator_passes(fused):
    mesh = mesh_of(dp=8)
    step = gradaccum.accumulate(
        programs.loss, microbatches=4, axis_name="dp", mesh=mesh, fused=fused
    )
    audit.assert_one_reduction(
        compiled(jax.value_and_grad(step), *arguments(mesh, "dp")), axis_name="dp"
    )


def test_no_reduction_at_all_fails():
    made = program(GRAD, mesh_of(dp=8), out=P("dp"))
    with pytest.raises(AssertionError, match=r"no gradient is reduced over dp=8: of 0 operations"):
        audit.assert_one_reduction(made, axis_name="dp")


def test_a_maximum_is_no_reduction_of_gradients():
    made = program(lambda p, x: jax.lax.pmax(GRAD(p, x), "dp"), mesh_of(dp=8))
    assert [row.kind for row in audit.collectives(made)] == ["all-reduce"]
    with pytest.raises(AssertionError, match=r"no gradient is reduced over dp=8: of 1 operations"):
        audit.assert_one_reduction(made, axis_name="dp")
