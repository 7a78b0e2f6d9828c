"""The faults that others' windows and hooks had, each with every communication hook."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import hooks

K, ROWS, D = 3, 16, 32
HOOKS = {
    "none": (None, 1e-5),
    "int8": (hooks.int8_quantize(error_feedback=True, min_size=1, block_size=D), 2e-2),
    "powersgd": (hooks.powersgd(rank=2, min_compression_rate=1), 1e-4),
}
each_hook = pytest.mark.parametrize(("hook", "within"), HOOKS.values(), ids=list(HOOKS))


@functools.cache
def mesh_of():
    return helpers.data_mesh(8)


def batch(call):
    return jnp.asarray(helpers.normal(call, ROWS, D) + call, jnp.float32)


def loss_fn(w, x):
    """Its gradient is an outer product of the batch's mean: of rank 1, and another in each call."""
    return jnp.sum(jnp.mean(x, axis=0)[:, None] * w)


def exact(calls):
    """Returns the mean of the gradients of some calls."""
    rows = np.concatenate([np.asarray(batch(i), np.float64) for i in calls])
    return np.broadcast_to(rows.mean(0)[:, None], (D, D))


def program(hook):
    tx = gradaccum.MultiSteps(optax.scale(1.0), K, axis_name="dp", mesh=mesh_of(), comm_hook=hook)
    grad_fn = gradaccum.unreduced_value_and_grad(loss_fn, axis_name="dp", mesh=mesh_of())
    w = jax.device_put(jnp.zeros((D, D)), NamedSharding(mesh_of(), P()))

    @functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)
    def step(state, x):
        return tx.update(grad_fn(w, x)[1], state, w)

    return tx, step, tx.init(w), w


def run(hook, calls):
    tx, step, state, w = program(hook)
    updates = []
    for i in calls:
        update, state = step(state, batch(i))
        updates.append(update)
    return updates, state, tx, w


@each_hook
def test_h1_the_mean_is_taken_in_the_windows_last_call(hook, within):
    """Not where i % k == 0, which takes call 0 alone, and then 1 to 3."""
    updates, *_ = run(hook, range(2 * K))
    assert [bool(np.any(u)) for u in updates] == [False, False, True] * 2
    assert_close(updates[2], exact(range(3)), within=within)
    wrong = exact(range(1, 4))
    assert np.abs(np.asarray(updates[2]) - wrong).max() > 10 * within * np.abs(wrong).max()


@each_hook
def test_h2_nothing_is_reset_inside_a_window(hook, within):
    """A reset in each call leaves the last microbatch alone; none at all leaves the last window."""
    updates, *_ = run(hook, range(2 * K))
    got = np.asarray(updates[5])
    # What a hook kept of the first window may be in it: as much as that was off.
    assert_close(updates[5], exact(range(3, 6)), within=2 * within)
    for wrong in (exact([5]), exact(range(6))):
        assert np.abs(got - wrong).max() > 4 * within * np.abs(wrong).max()


@each_hook
def test_h3_h4_a_window_communicates_once(hook, within):
    """Every operation stands in the branch that its last call takes; optax's runs in every call."""
    _, step, state, w = program(hook)
    report = gradaccum.audit.collectives(step, state, batch(0), mesh=mesh_of())
    over = report.over("dp")
    assert over
    assert all(row.conditional and row.executions == 1 for row in over)
    gradaccum.audit.assert_one_reduction(
        step, state, batch(0), axis_name="dp", mesh=mesh_of(), conditional=True
    )
    if hook is None:
        tx = optax.MultiSteps(optax.scale(1.0), K)
        naive = jax.jit(lambda s, x: tx.update(jax.grad(loss_fn)(w, x), s, w))
        x = jax.device_put(batch(0), NamedSharding(mesh_of(), P("dp")))
        rows = gradaccum.audit.collectives(naive, tx.init(w), x, mesh=mesh_of()).over("dp")
        assert any(not row.conditional for row in rows)


@each_hook
def test_h7_a_call_too_many_begins_the_next_window(hook, within):
    updates, state, *_ = run(hook, range(K + 1))
    assert_close(updates[2], exact(range(3)), within=within)
    assert not np.any(updates[3])
    assert (int(state.mini_step), int(state.gradient_step)) == (1, 1)


@each_hook
def test_h8_an_epoch_shorter_than_a_window(hook, within):
    """The mean is over the calls that there were, not over k."""
    updates, state, tx, w = run(hook, range(2))
    assert not any(np.any(u) for u in updates)
    update, state = tx.flush(state, w)
    assert_close(update, exact(range(2)), within=within)
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
    wrong = exact(range(2)) * 2 / 3
    assert np.abs(np.asarray(update) - wrong).max() > 4 * within * np.abs(wrong).max()
