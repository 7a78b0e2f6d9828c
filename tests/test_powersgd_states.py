"""The state of `powersgd`: what never enters it, its types, its use, and states of others."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from powersgd_reference import (
    SHAPES,
    WEIGHTS,
    WITHIN,
    N,
    by_weight,
    equal,
    exact,
    few_rows,
    low_rank_rows,
    off,
    put,
    run,
    shared,
    start,
)

import gradaccum
from gradaccum.hooks import powersgd
from gradaccum.hooks._low_rank import orthonormal

# --- What never enters the state -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_not_a_number_shows_in_its_matrix_and_is_gone_afterwards(bad):
    hook = powersgd(rank=2)
    good = by_weight(helpers.normal(0, N, *SHAPES["stack"]), WEIGHTS)
    _, state = run(hook, good, WEIGHTS, start(hook, good))
    broken = good.copy()
    broken[4, 1, 3, 5] = bad
    mean, after = run(hook, broken, WEIGHTS, state)
    assert np.isnan(mean[1]).all()
    assert np.isfinite(np.asarray(mean)[[0, 2]]).all()
    equal((after.q[1], after.residual.rows[:, 1]), (state.q[1], state.residual.rows[:, 1]))
    assert off(after.q[0], np.asarray(state.q[0])) > 1e-3  # the other matrices go on
    mean, after = run(hook, good, WEIGHTS, after)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((mean, after)))
    assert off(mean[1], np.asarray(run(hook, good, WEIGHTS, state)[0])[1]) < 1e-5


def test_nothing_for_some_steps_then_something():
    hook = powersgd(rank=3)
    state = start(hook, np.zeros((N, 20, 16), np.float32))
    nothing = np.zeros((N, 20, 16), np.float32)
    one = by_weight(low_rank_rows(5, 1), WEIGHTS)
    for rows in (nothing, nothing, one, one, one, nothing):
        mean, state = run(hook, rows, WEIGHTS, state)
        np.testing.assert_allclose(mean, exact(rows, WEIGHTS), atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(state.q, axis=0), 1, atol=0.6)
        assert np.linalg.matrix_rank(state.q, tol=1e-2) == 3
    rows = by_weight(low_rank_rows(20, 3), WEIGHTS)
    mean, _ = run(hook, rows, WEIGHTS, state)
    assert off(mean, exact(rows, WEIGHTS)) < 1e-5


def test_a_window_without_any_weight_changes_nothing():
    hook = powersgd(rank=2)
    rows = by_weight(helpers.normal(0, N, 24, 20), WEIGHTS)
    _, state = run(hook, rows, WEIGHTS, start(hook, rows))
    assert np.abs(state.residual.rows).max() > 0.1
    mean, after = run(hook, 0 * rows, 0 * WEIGHTS, state)
    equal((mean, after.q, after.residual), (0 * mean, state.q, state.residual))


# --- Types ---------------------------------------------------------------------------------------


def test_the_states_types_and_buffers_stay():
    hook, rows = powersgd(rank=2), few_rows()
    state = start(hook, rows)
    mean, after = run(hook, rows, WEIGHTS, state)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    with jax.set_mesh(helpers.data_mesh(N)):
        eager = hook(shared(put(rows), put(WEIGHTS)), state)
        assert_close(eager, (mean, after), within=1e-6)
        step = lambda rows, state: hook(shared(rows, put(WEIGHTS)), state)  # noqa: E731
        donated = jax.jit(step, donate_argnums=1, compiler_options=helpers.COMPILE_FAST)
        big = after.residual.rows["matrix"]
        _, again = donated(put(rows), after)
        assert big.is_deleted()
        assert not again.residual.rows["matrix"].is_deleted()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        hook = powersgd(rank=2)
        rows = jnp.asarray(low_rank_rows(0, 2), dtype)
        state = start(hook, rows)
        mean, after = run(hook, rows, np.ones(N, np.float32), state)
        assert (mean.dtype, after.q.dtype) == (dtype, np.float32)
        assert after.residual.rows.dtype == ("float64" if dtype == "float64" else "float32")
        assert_close(mean, exact(np.asarray(rows, np.float64), np.ones(N)), dtype)


def test_integers_complex_numbers_and_sums_travel_as_they_are():
    hook = powersgd(rank=1)
    rows = {
        "count": np.arange(N * 64, dtype=np.int32).reshape(N, 8, 8),
        "complex": helpers.normal(0, N, 8, 8).astype(np.complex64),
        "total": helpers.normal(1, N, 8, 8).astype(np.float32),
        "empty": np.zeros((N, 0, 0), np.float32),
    }
    with jax.set_mesh(helpers.data_mesh(N)):
        tree = shared(put(rows), put(WEIGHTS))
        awaited = dataclasses.replace(tree["total"].awaited, total=True)
        tree["total"] = dataclasses.replace(tree["total"], awaited=awaited)
        state = hook.init(tree)
        mean, _ = hook(tree, state)
    assert jax.tree.leaves((state.q, state.residual)) == []
    assert_close(mean["count"], exact(rows["count"], WEIGHTS))
    assert_close(mean["complex"], rows["complex"].sum(0) / WEIGHTS.sum())
    assert_close(mean["total"], rows["total"].astype(np.float64).sum(0))
    assert mean["empty"].shape == (0, 0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30], ids=str)
def test_orthonormal(scale):
    x = helpers.normal(0, 3, 30, 6)
    x[0, :, 1] = x[0, :, 0] + 1e-3 * x[0, :, 1]  # nearly parallel
    x[0, :, 2] = x[0, :, 0] - 1e-4 * x[0, :, 2]
    x[1, :, 1] = 2 * x[1, :, 0]  # parallel
    x[1, :, 4] = 0
    x[2] = 0
    (got,) = jax.jit(orthonormal, static_argnums=1)([jnp.asarray(x * scale, jnp.float32)], 6)
    gram = np.asarray(got, np.float64).mT @ np.asarray(got, np.float64)
    kept = np.array([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0] * 6])
    np.testing.assert_allclose(gram, np.eye(6) * kept[:, None], atol=1e-6)
    own = np.asarray(got[0], np.float64)
    left = x[0] - own @ own.T @ x[0]
    assert np.max(np.abs(left)) < 1e-6 * np.max(np.abs(x[0]))


def test_in_multisteps():
    """A window of two calls sends once; what is dropped leaves the factors as they were."""
    hook = powersgd(rank=2)
    skip = lambda updates, step, params: (jnp.isnan(optax.tree.norm(updates)), ())  # noqa: E731
    tx = gradaccum.MultiSteps(
        optax.sgd(1.0), 2, axis_name="dp", comm_hook=hook, should_skip_update_fn=skip
    )
    params = jnp.zeros((24, 20))
    rows = [by_weight(helpers.normal(t, N, 24, 20), WEIGHTS) for t in range(2)]
    with jax.set_mesh(helpers.data_mesh(N)):
        update = jax.jit(
            lambda rows, state: tx.update(shared(rows, jnp.asarray(WEIGHTS)), state, params)
        )
        state = tx.init(params)
        for t in range(2):
            updates, state = update(put(rows[t]), state)
        mean, after = run(hook, rows[0] + rows[1], 2 * WEIGHTS, start(hook, rows[0]))
        assert_close(-updates, mean, within=WITHIN)
        assert_close(state.comm_state.residual.rows, after.residual.rows, within=WITHIN)
        before = jax.device_get(state.comm_state)
        for t in range(2):
            _, state = update(put(rows[t] * np.float32([1, np.nan][t])), state)
        equal(jax.device_get(state.comm_state), before)


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0; required: an int of at least 1"),
        ({"rank": 2.0}, "rank=2.0; required: an int of at least 1"),
        ({"start_step": -1}, "start_step=-1; required: an int of at least 0"),
        ({"min_compression_rate": 0}, "min_compression_rate=0; required: > 0"),
    ],
    ids=str,
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=f"powersgd: {message}"):
        powersgd(**options)


def test_states_of_others():
    rows = helpers.normal(0, N, 24, 20).astype(np.float32)
    two = r"rank=2.*: the tree: factors \(20, 3\) and a residual, needed factors \(20, 2\) and a"
    none = r"the tree: no factors and a residual, needed factors \(20, 4\)"
    kept = r"the tree: factors \(20, 4\) and a residual, needed factors \(20, 4\) and no residual"
    cold = powersgd(warm_start=False)
    for hook, other, message in (
        (powersgd(rank=2), powersgd(rank=3), two),
        (powersgd(), cold, none),
        (powersgd(error_feedback=False), powersgd(), kept),
    ):
        with pytest.raises(ValueError, match=f"powersgd: the state is not of these.*{message}"):
            run(hook, rows, WEIGHTS, start(other, rows))
    with pytest.raises(ValueError, match=r"powersgd: .*\(8, 24, 20\), needed \(8, 20, 24\)"):
        run(cold, rows.mT.copy(), WEIGHTS, start(cold, rows))
