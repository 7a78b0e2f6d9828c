"""`int8_quantize`: its error against the exact mean, in one step and over many."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradaccum import Unreduced
from gradaccum.hooks import int8_quantize
from gradaccum.hooks._blocks import quantise

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)
N, BLOCK = 8, 32
ROUNDING = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
WEIGHTS = np.float32([3, 1, 0, 4, 1, 5, 9, 2])  # of the rows, one of them empty


@pytest.fixture(autouse=True)
def mesh():
    mesh = helpers.data_mesh(N)
    with jax.set_mesh(mesh):
        yield mesh


def rows_of(mesh, sums, weights=WEIGHTS):
    """Returns `Unreduced` values of sums `[n, *shape]`, one row a device."""
    on = NamedSharding(mesh, P("dp"))
    put = lambda x: jax.device_put(x, on)  # noqa: E731
    weights = put(weights)
    return jax.tree.map(lambda x: Unreduced(put(x), weights, "dp"), sums)


def random_sums(seed, *shape, weights=WEIGHTS):
    """Returns sums whose means have a variance of 1; an empty row's is 0."""
    values = helpers.normal(seed, N, *shape).astype(np.float32)
    return values * weights.reshape(-1, *[1] * len(shape))


def exact_mean(sums, weights=WEIGHTS):
    return sums.astype(np.float64).sum(0) / weights.astype(np.float64).sum()


def largest(x):
    """Returns the largest entry of each block of a flat array, for every entry of it."""
    return np.repeat(np.abs(x).reshape(*x.shape[:-1], -1, BLOCK).max(-1), BLOCK, axis=-1)


def bound(sums, weights=WEIGHTS, step=0.5):
    """Returns how far each entry of a mean may be off, of leaves that blocks divide.

    Args:
      sums: `[n, size]`.
      weights: `[n]`.
      step: by how much of a step int8 is off at most.
    """
    first = step / 127 * largest(sums.astype(np.float64)).sum(0)
    again = step / 127 * largest(np.abs(sums.astype(np.float64).sum(0)) + first)
    return (first + again) * (1 + 1e-5) / weights.sum()


# --- One step -------------------------------------------------------------------------------------


def mixed_sizes(seed=0):
    """Returns sums of blocks that differ by up to 10^8: one scale for several would be wrong."""
    sums = random_sums(seed, 4 * N * BLOCK)
    return (sums * np.repeat(10.0 ** (np.arange(4 * N) % 9 - 4), BLOCK)).astype(np.float32)


@pytest.mark.parametrize(
    ("rounding", "compiled"),
    [("nearest", True), ("nearest", False), ("stochastic", True)],
    ids=["nearest", "eager", "stochastic"],
)
def test_each_entry_is_within_the_bound_of_its_block(mesh, rounding, compiled):
    sums = mixed_sizes()
    rows = rows_of(mesh, {"w": sums})
    step = 0.5 if rounding == "nearest" else 1.0

    def error(block_size):
        hook = int8_quantize(rounding=rounding, block_size=block_size)
        mean, _ = (jit(hook) if compiled else hook)(rows, hook.init(rows))
        assert mean["w"].dtype == np.float32
        return np.abs(np.asarray(mean["w"], np.float64) - exact_mean(sums))

    allowed, off = bound(sums, step=step), error(BLOCK)
    assert np.all(off <= allowed), np.max(off / allowed)
    assert np.max(off / allowed) > 0.2  # it is quantised, and the bound is no wild one
    if compiled:
        assert np.max(error(4 * BLOCK) / allowed) > 50  # a scale of other blocks'


def test_stochastic_rounding_is_right_on_average(mesh):
    """Over 400 means, each of other random numbers, by the key that the state counts."""
    size, count = 4 * N * BLOCK, 400
    sums = random_sums(1, size)
    rows = rows_of(mesh, sums)

    def average(**options):
        hook = int8_quantize(block_size=BLOCK, **options)

        def step(carry, _):
            total, state = carry
            mean, state = hook(rows, state)
            return (total + mean, state), None

        start = (jnp.zeros(size), hook.init(rows))
        return jit(lambda: jax.lax.scan(step, start, length=count)[0][0] / count)()

    # A step s is rounded up or down: a variance of s^2 / 4 at most, on each device and of the sum.
    first = largest(sums.astype(np.float64)) / 127
    again = largest(np.abs(sums.astype(np.float64).sum(0)) + first.sum(0)) / 127
    sigma = np.sqrt(((first**2).sum(0) + again**2) / 4 / count) / WEIGHTS.sum()
    nearest, one, other = (
        average(**options)
        for options in ({}, {"rounding": "stochastic"}, {"rounding": "stochastic", "seed": 1})
    )
    off = [np.max(np.abs(x - exact_mean(sums)) / sigma) for x in (nearest, one, other)]
    assert off[0] > 10  # always rounded the same way
    assert max(off[1:]) < 5
    assert np.any(one != other)


def test_devices_and_leaves_and_steps_round_differently(mesh):
    """Equal sums of 10.5 steps everywhere, in 2 leaves, 2 steps, 8 devices."""
    sums = np.full((N, 8 * N * BLOCK), 10.5, np.float32)
    sums[:, ::BLOCK] = 127 * (-1.0) ** np.arange(N)[:, None]  # 0 in the sum, whose steps are finer
    rows = rows_of(mesh, {"a": sums, "b": sums}, np.ones(N, np.float32))
    hook = int8_quantize(rounding="stochastic", block_size=BLOCK)
    fun = jit(hook)
    one, state = fun(rows, hook.init(rows))
    two, _ = fun(rows, state)
    means = [np.asarray(x) for x in (one["a"], one["b"], two["a"], two["b"])]
    for i, x in enumerate(means):
        assert not any(np.array_equal(x, y) for y in means[:i])
        # Eight devices with the same random numbers would all have 10, or all 11.
        inner = x.reshape(-1, BLOCK)[:, 1:]
        assert np.mean(np.abs(inner - 10.5) < 0.3) > 0.5


# --- Many steps -----------------------------------------------------------------------------------


def window_weights(steps):
    """Returns weights `[steps, n]`: windows of 8 and of 3 calls, shares that change, empty rows."""
    rng = np.random.default_rng(3)
    weights = rng.integers(1, 6, (steps, N)) * np.where(np.arange(steps) % 3, 3, 8)[:, None]
    weights[rng.random((steps, N)) < 0.2] = 0
    weights[steps // 2] = 0  # a window that weighs nothing
    weights[:, 5] = 0  # a device that never has an example, and yet owns a part of the sums
    return weights.astype(np.float32)


def steps_of(mesh, hook, values, weights):
    """Returns each step's mean `[steps, size]` and mean residual, of values `[steps, n, size]`."""
    on = NamedSharding(mesh, P(None, "dp"))
    sums = jax.device_put(values * weights[..., None], on)

    def step(state, xs):
        mean, state = hook(Unreduced(*xs, "dp"), state)
        kept = state.residual if hook.error_feedback else None
        return state, (mean, jnp.zeros(()) if kept is None else jnp.mean(kept.rows, axis=0))

    @jit
    def run(sums, weights):
        state = hook.init(Unreduced(sums[0], weights[0], "dp"))
        return jax.lax.scan(step, state, (sums, weights))[1]

    return jax.tree.map(np.asarray, run(sums, jax.device_put(weights, on)))


@ROUNDING
@pytest.mark.parametrize("gradients", ["constant", "random"])
def test_with_error_feedback_the_sum_over_100_steps_stays_right(mesh, rounding, gradients):
    steps, size = 100, 4 * N * BLOCK
    weights = window_weights(steps)
    values = helpers.normal(4, steps, N, size) + np.linspace(-1, 1, size)
    if gradients == "constant":
        values = np.broadcast_to(values[:1], values.shape)
    values = values.astype(np.float32)
    total = weights.sum(1, keepdims=True)
    exact = (values * weights[..., None]).astype(np.float64).sum(1)
    exact = exact / np.where(total, total, 1)

    def off(**options):
        hook = int8_quantize(rounding=rounding, block_size=BLOCK, **options)
        means, kept = steps_of(mesh, hook, values, weights)
        assert not means[steps // 2].any()
        return means - exact, kept

    each, kept = off(error_feedback=True)
    summed = np.cumsum(each, axis=0)
    # The residuals are all that is missing, to float32's rounding.
    np.testing.assert_allclose(summed, -kept, atol=2e-4)
    plain, _ = off()
    one_step = np.max(np.abs(plain))
    assert np.max(np.abs(summed)) < 1.5 * one_step
    assert np.max(np.abs(each[50:])) < 1.5 * np.max(np.abs(each[:50]))  # it does not grow
    drift = np.max(np.abs(np.cumsum(plain, axis=0)))
    if gradients == "constant" and rounding == "nearest":
        assert drift > 20 * one_step  # the same error a hundred times
    assert drift > 2 * np.max(np.abs(summed))


def test_an_empty_window_and_what_is_not_finite_leave_residuals_alone(mesh):
    """An inf or NaN shows in its block of the mean, and in nothing that is kept."""
    size = 4 * N * BLOCK
    hook = int8_quantize(block_size=BLOCK, error_feedback=True)
    fun, sums = jit(hook), random_sums(5, size)
    rows = rows_of(mesh, sums)
    _, state = fun(rows, hook.init(rows))
    empty, same = fun(rows_of(mesh, np.zeros_like(sums), np.zeros(N, np.float32)), state)
    assert not np.any(np.asarray(empty))
    np.testing.assert_array_equal(state.residual.rows, same.residual.rows)
    bad_sums = sums.copy()
    bad_sums[1, 3], bad_sums[2, BLOCK + 7], bad_sums[7, 5 * BLOCK] = np.nan, np.inf, -np.inf
    bad, after = fun(rows_of(mesh, bad_sums), state)
    is_bad = np.isnan(np.asarray(bad)).reshape(-1, BLOCK)
    assert np.flatnonzero(is_bad.any(1)).tolist() == [0, 1, 5]
    assert is_bad[[0, 1, 5]].all()
    kept, before = (np.asarray(s.residual.rows).reshape(N, -1, BLOCK) for s in (after, state))
    assert np.all(np.isfinite(kept))
    for device, block in ((1, 0), (2, 1), (7, 5)):
        np.testing.assert_array_equal(kept[device, block], before[device, block])
    again, _ = fun(rows, after)
    assert np.max(np.abs(again - exact_mean(sums))) < 4 * np.max(bound(sums))


def test_zeros_and_subnormal_numbers(mesh):
    sums = np.zeros((N, 4 * N * BLOCK), np.float32)
    sums[:, BLOCK : 2 * BLOCK] = 1e-39
    sums[:, 2 * BLOCK : 3 * BLOCK] = 1e-30
    sums[:, 3 * BLOCK : 4 * BLOCK] = 1e37
    for rounding in ("nearest", "stochastic"):
        hook = int8_quantize(rounding=rounding, block_size=BLOCK)
        rows = rows_of(mesh, sums, np.ones(N, np.float32))
        mean = np.asarray(jit(hook)(rows, hook.init(rows))[0])
        assert not mean[: 2 * BLOCK].any()
        assert not mean[4 * BLOCK :].any()
        np.testing.assert_allclose(
            mean[2 * BLOCK : 4 * BLOCK], sums[0, 2 * BLOCK : 4 * BLOCK], 0.01
        )


def test_a_block_of_zeros_divides_by_nothing():
    with jax.debug_nans(True):
        blocks = quantise(jnp.array([[0.0, 0.0], [1e-39, -1e-39]]))
        assert not np.any(blocks.values)
        assert not np.any(blocks.scales)
        with pytest.raises(FloatingPointError):
            quantise(jnp.array([[jnp.inf, 1.0]]))  # the check sees it
