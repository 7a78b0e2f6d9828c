"""`powersgd`: each step against NumPy's float64, over many of them, and what feedback keeps."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import powersgd_reference as reference
import pytest
from helpers import assert_close
from powersgd_reference import (
    COMPRESSED,
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
    run,
    shared,
    start,
)

from gradaccum.hooks import powersgd


@pytest.mark.parametrize("error_feedback", [True, False], ids=["feedback", "none"])
def test_five_steps_are_those_of_numpy(error_feedback):
    """Mixed trees, of windows of other lengths, in which another device has nothing each time."""
    hook = powersgd(rank=2, error_feedback=error_feedback)
    zeros = {k: np.zeros((N, *s), np.float32) for k, s in SHAPES.items()}
    state = start(hook, zeros)
    assert [k for k, q in state.q.items() if q is not None] == list(COMPRESSED)
    assert (state.residual is not None) == error_feedback
    kept = {k: (np.zeros((N, *SHAPES[k])), np.asarray(state.q[k])) for k in COMPRESSED}
    for t in range(5):
        weights = np.roll(WEIGHTS, t) * (1 + 10 * t)
        rows = {
            k: by_weight(helpers.normal(10 * t + i, N, *s), weights)
            for i, (k, s) in enumerate(SHAPES.items())
        }
        mean, state = run(hook, rows, weights, state)
        want = {k: exact(x, weights) for k, x in rows.items()}
        for k in COMPRESSED:
            want[k], *kept[k] = reference.step(rows[k], weights, *kept[k])
            if not error_feedback:
                kept[k][0] = np.zeros((N, *SHAPES[k]))
            assert off(want[k], exact(rows[k], weights)) > 0.1  # else there is nothing to see
        assert_close(mean, want, within=WITHIN)
        assert_close(
            {k: state.q[k] for k in COMPRESSED}, {k: kept[k][1] for k in COMPRESSED}, within=1e-4
        )
        if error_feedback:
            got = {k: state.residual.rows[k] for k in COMPRESSED}
            assert_close(got, {k: kept[k][0] for k in COMPRESSED}, within=WITHIN)
    assert int(state.steps) == 5


@pytest.mark.parametrize("warm_start", [True, False], ids=["warm", "cold"])
def test_exact_up_to_its_rank(warm_start):
    hook = powersgd(rank=3, warm_start=warm_start)
    state = start(hook, np.zeros((N, 20, 16), np.float32))
    for t in range(3):  # each of another space
        rows = by_weight(low_rank_rows(10 * t, 3 - t), WEIGHTS)
        mean, state = run(hook, rows, WEIGHTS, state)
        assert off(mean, exact(rows, WEIGHTS)) < 1e-5
    rows = by_weight(low_rank_rows(50, 4), WEIGHTS)
    assert off(run(hook, rows, WEIGHTS, state)[0], exact(rows, WEIGHTS)) > 1e-3


def test_without_warm_start_each_window_is_projected_on_another_space():
    hook = powersgd(rank=2, warm_start=False, error_feedback=False)
    rows = by_weight(helpers.normal(0, N, 24, 20), WEIGHTS)
    want, state, means = exact(rows, WEIGHTS), start(hook, rows), []
    assert jax.tree.leaves((state.q, state.residual)) == []
    for _ in range(3):
        mean, state = run(hook, rows, WEIGHTS, state)
        basis = np.linalg.svd(np.asarray(mean, np.float64))[0][:, :2]
        assert_close(np.asarray(mean), basis @ basis.T @ want, within=WITHIN)
        means.append(np.asarray(mean))
    assert min(off(means[1], means[0]), off(means[2], means[1])) > 0.1
    other = dataclasses.replace(hook, seed=1)
    assert off(run(other, rows, WEIGHTS, start(other, rows))[0], means[0]) > 0.1


def test_warm_start_finds_the_best_approximation():
    u, v = (np.linalg.qr(helpers.normal(i, n, 12))[0] for i, n in ((0, 24), (1, 20)))
    want = u * 0.7 ** np.arange(12) @ v.T
    rows = by_weight(np.stack([want] * N), WEIGHTS)
    least = np.linalg.norm(want - reference.best(want, 2))
    worse = {}
    for warm in (True, False):
        hook = powersgd(rank=2, error_feedback=False, warm_start=warm)
        state = start(hook, rows)
        for _ in range(12):
            mean, state = run(hook, rows, WEIGHTS, state)
        worse[warm] = np.linalg.norm(np.asarray(mean) - want) / least
    assert worse[True] < 1.001
    assert worse[False] > 1.02


def test_what_was_not_sent_is_the_residual_and_does_not_grow():
    constant = helpers.normal(0, 24, 20)  # of full rank: only feedback ever sends all of it
    steps = 100
    noise = helpers.normal(1, steps, N, 24, 20)
    weights = WEIGHTS
    rows = by_weight(np.moveaxis(constant + noise, 1, 0), weights)  # [d, t, n, m]
    rows = np.moveaxis(rows, 1, 0)
    want = np.cumsum([exact(x, weights) for x in rows], axis=0)
    missing = {}
    for feedback in (True, False):
        hook = powersgd(rank=2, error_feedback=feedback)

        def many(rows, state, hook=hook):
            def one(state, x):
                mean, state = hook(shared(x, jnp.asarray(weights)), state)
                return state, (mean, state.residual)

            return jax.lax.scan(one, state, rows)[1]

        with jax.set_mesh(helpers.data_mesh(N)):
            jitted = jax.jit(many, compiler_options=helpers.COMPILE_FAST)
            sent, kept = jitted(rows, start(hook, rows[0]))
        gap = want - np.cumsum(np.asarray(sent, np.float64), axis=0)
        if feedback:
            held = np.einsum("d,tdnm->tnm", weights, np.asarray(kept.rows)) / weights.sum()
            assert np.max(np.abs(gap - held)) < 1e-4 * np.max(np.abs(held))
        missing[feedback] = np.linalg.norm(gap, axis=(1, 2))
    assert missing[True][50:].max() < 1.2 * missing[True][10:50].max()
    assert missing[False][99] > 1.8 * missing[False][49]
    assert missing[False][99] > 5 * missing[True].max()


def test_start_step_takes_plain_means_first():
    hook, at_once = powersgd(rank=2, start_step=2), powersgd(rank=2)
    rows = few_rows()
    state = first = start(hook, rows)
    want = {k: exact(x, WEIGHTS) for k, x in rows.items()}
    for t in range(2):
        mean, state = run(hook, rows, WEIGHTS, state)
        assert_close(mean, want, within=1e-6)
        equal((state.q, state.residual), (first.q, first.residual))
        assert int(state.steps) == t + 1
    mean, state = run(hook, rows, WEIGHTS, state)
    got, after = run(at_once, rows, WEIGHTS, start(at_once, rows))
    assert_close((mean, state.q, state.residual), (got, after.q, after.residual), within=WITHIN)
    assert off(mean["matrix"], want["matrix"]) > 0.1

    def branches(hook):
        with jax.set_mesh(helpers.data_mesh(N)):
            fun = lambda rows, state: hook(shared(rows, jnp.asarray(WEIGHTS)), state)  # noqa: E731
            return helpers.count_primitive(fun, "cond", rows, start(hook, rows))

    assert (branches(hook), branches(at_once)) == (1, 0)
