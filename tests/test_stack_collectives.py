"""What one sharded stack communicates: in the loop, undifferentiated, in a step; its memory."""

import collections
import functools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import shapes

import gradaccum
from gradaccum import audit

LAYERS, B, D, K = 8, 64, 64, 4
TREE = 4 * LAYERS * D * D  # bytes


def loss_fn(w, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
    return jnp.mean(h**2)


@functools.cache
def mesh_of(**sizes):
    return layouts.mesh_of(sizes)


def arguments(mesh, spec, data="dp"):
    return (
        shapes(np.zeros((LAYERS, D, D), np.float32), mesh, spec),
        shapes(np.zeros((B, D), np.float32), mesh, P(data)),
    )


def accumulated(mesh, data="dp", **options):
    return gradaccum.accumulate(loss_fn, microbatches=K, mesh=mesh, axis_name=data, **options)


def test_a_loop_that_gathers_and_scatters_is_seen():
    """The control: what the partitioner makes of FSDP by sharding alone."""
    mesh = mesh_of(dp=8)

    def naive(w, x):
        rows = NamedSharding(mesh, P(None, "dp"))
        parts = jax.lax.with_sharding_constraint(x.reshape(K, B // K, D), rows)

        def body(total, x):
            grads = jax.lax.with_sharding_constraint(
                jax.grad(loss_fn)(w, x), NamedSharding(mesh, P(None, "dp"))
            )
            return total + grads, None

        return jax.lax.scan(body, jnp.zeros_like(w), parts)[0]

    args = arguments(mesh, P(None, "dp"))
    report = audit.collectives(jax.jit(naive), *args)
    assert any((row.executions or 0) >= K for row in report if "dp" in row.axes), str(report)
    with pytest.raises(AssertionError, match="times a call"):
        audit.assert_one_reduction(jax.jit(naive), *args, axis_name="dp")
    ours = jax.jit(jax.grad(accumulated(mesh, in_specs=(P(None, "dp"),))))
    audit.assert_one_reduction(ours, *args, axis_name="dp")


def test_undifferentiated_it_gathers_and_reduces_scalars_only():
    mesh = mesh_of(dp=8)
    fun = jax.jit(accumulated(mesh, in_specs=(P(None, "dp"),)))
    report = audit.collectives(fun, *arguments(mesh, P(None, "dp")))
    found = {row.kind: row.bytes * row.executions for row in report}
    assert found == {"all-gather": TREE, "all-reduce": 4}


def test_what_is_not_differentiated_is_gathered_alone():
    mesh = mesh_of(dp=8)

    def fun(b, x, w):
        return loss_fn(w, x) * jnp.sum(b)

    f = gradaccum.accumulate(
        fun, microbatches=K, mesh=mesh, in_specs=(P("dp"), None, P(None, "dp"))
    )
    w, x = arguments(mesh, P(None, "dp"))
    b = shapes(np.zeros(D, np.float32), mesh, P("dp"))
    rows = audit.collectives(jax.jit(jax.value_and_grad(f)), b, x, w)
    found = collections.Counter()
    for row in rows:
        found[row.kind] += row.bytes * row.executions
    assert found == {"all-gather": TREE + 4 * D, "reduce-scatter": 4 * D, "all-reduce": 4}


def adamw_step(fun, mesh, params_spec, grads_spec):
    """One step of AdamW with clipping, all of it in one program, and its arguments."""
    import optax

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    w, x = arguments(mesh, params_spec)
    state = jax.eval_shape(tx.init, w)
    state = shapes(state, mesh, jax.tree.map(lambda s: grads_spec if s.ndim else P(), state))

    def step(w, state, x):
        loss, grads = fun.value_and_grad()(w, x)
        part = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, grads_spec))
        updates, state = tx.update(grads, state, part)
        w = jax.lax.with_sharding_constraint(part + updates, NamedSharding(mesh, params_spec))
        return w, state, loss

    return jax.jit(step, donate_argnums=(0, 1)), (w, state, x)


BOTH_WAYS = {"reduce-scatter", "all-gather"}
STEPS = {
    "replicated": ({}, P(), P(), {"all-reduce"}),
    "zero": ({"grad_specs": (P("dp"),)}, P(), P("dp"), BOTH_WAYS),
    "fsdp": ({"in_specs": (P("dp"),)}, P("dp"), P("dp"), BOTH_WAYS),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step_moves_the_parameters_once_each_way(name):
    """Optimizer and clipping add the norm's scalar alone; ZeRO gathers what was updated."""
    mesh = mesh_of(dp=8)
    options, params_spec, grads_spec, kinds = STEPS[name]
    step, args = adamw_step(accumulated(mesh, **options), mesh, params_spec, grads_spec)
    report = audit.collectives(step, *args)
    found = collections.Counter()
    for row in report:
        assert row.executions == 1, str(report)
        found[row.kind] += row.bytes
    assert kinds <= set(found) <= kinds | {"all-reduce"}, str(report)
    for kind, size in found.items():  # beside them at most loss and norm
        assert 0 <= size - (TREE if kind in kinds else 0) <= 8, str(report)
    audit.assert_one_reduction(step, *args, axis_name="dp")


def test_sharded_gradients_and_state_take_less_memory():
    """Bytes of a step on one device, in parameters: the arguments and what is temporary."""
    mesh = mesh_of(dp=8)

    def memory(name):
        options, params_spec, grads_spec, _ = STEPS[name]
        step, args = adamw_step(accumulated(mesh, **options), mesh, params_spec, grads_spec)
        found = step.lower(*args).compile().memory_analysis()
        return found.argument_size_in_bytes / TREE, found.temp_size_in_bytes / TREE

    (whole, temporary), (zero, zero_temporary), (fsdp, _) = map(memory, STEPS)
    assert zero_temporary < 0.8 * temporary
    assert whole > 3  # parameters and two moments
    assert zero < 1.3  # parameters, and an eighth of each moment
    assert fsdp < 0.45  # an eighth of each
