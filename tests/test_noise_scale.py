"""`gradient_noise_scale`: against closed forms and float64 rows; its average, its hook."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import COMPILE_FAST, data_mesh

import gradaccum
from gradaccum import hooks
from gradaccum.hooks._noise_scale import gradient_noise_scale

N = 8
jit = functools.partial(jax.jit, compiler_options=COMPILE_FAST)


def estimate(rows, weights):
    """Returns S and |G|^2 of McCandlish et al., for rows of any weights, in float64."""
    rows = [np.asarray(r).astype(np.result_type(r.dtype, np.float64)) for r in rows]
    kept = [(w, r) for w, r in zip(np.asarray(weights, np.float64), rows, strict=True) if w > 0]
    total = sum(w for w, _ in kept)
    mean = sum(w * r for w, r in kept) / total
    square = lambda x: np.sum(np.abs(x) ** 2)  # noqa: E731
    spread = sum(w * square(r) for w, r in kept) / total - square(mean)
    noise = spread * total / (len(kept) - 1)
    return noise, square(mean) - noise / total


def assert_measured(state, rows, weights, within=1e-4):
    noise, signal = estimate(rows, weights)
    assert abs(signal) > 1e-2 * noise / sum(weights)  # else the comparison is of rounding
    np.testing.assert_allclose(state.noise, noise, rtol=within)
    np.testing.assert_allclose(state.signal, signal, rtol=within * (1 + noise / abs(signal)))
    np.testing.assert_allclose(
        state.noise_scale, state.noise / state.signal if signal > 0 else np.inf, rtol=1e-6
    )


def unreduced(rows, weights, axis_name="dp"):
    """Returns the `Unreduced` of rows [n, *shape] that are means."""
    weights = jnp.asarray(weights, jnp.float32)
    scale = lambda x: weights.astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1))  # noqa: E731
    make = lambda x: gradaccum.Unreduced(x * scale(x), weights, axis_name=axis_name)  # noqa: E731
    return jax.tree.map(make, rows)


# --- The expectation ------------------------------------------------------------------------------

D, SIGMA, MU = 8, 1.0, 0.5  # entries of a gradient; their deviation over examples; their mean
S, G2 = D * SIGMA**2, D * MU**2
STEPS, DECAY = 1500, 0.999


def deviation(total, rows):
    """Returns the standard deviations of the averaged S, |G|^2 and their ratio, relative.

    For Gaussian rows S is a chi-squared of D (rows - 1) degrees of freedom, independent of the
    mean; the average over STEPS windows counts as that of so many independent ones.
    """
    share = (1 - DECAY) * (1 + DECAY**STEPS) / ((1 + DECAY) * (1 - DECAY**STEPS))
    noise = 2 * D * SIGMA**4 / (rows - 1)
    mean = 4 * D * MU**2 * SIGMA**2 / total + 2 * D * SIGMA**4 / total**2
    signal = mean + noise / total**2
    ratio = noise / S**2 + signal / G2**2 + 2 * noise / (total * S * G2)
    return [float(np.sqrt(share * x)) for x in (noise / S**2, signal / G2**2, ratio)]


def simulate(weights):
    """Returns the state after STEPS windows, and the averaged sum over rows of |r|^2 / n."""
    hook = gradient_noise_scale(decay=DECAY)
    with jax.set_mesh(data_mesh(N)):
        place = jax.sharding.PartitionSpec("dp")
        weights = jax.device_put(jnp.asarray(weights, jnp.float32), place)
        inverse = jnp.where(weights > 0, 1 / jnp.maximum(weights, 1), 0)

        def window(state, key):
            z = SIGMA * jax.random.normal(key, (N, D)) * jnp.sqrt(inverse)[:, None]
            rows = jnp.where(weights[:, None] > 0, MU + z, 0)
            rows = jax.lax.with_sharding_constraint(rows, place)
            _, state = hook(unreduced(rows, weights), state)
            return state, jnp.mean(jnp.sum(rows**2, axis=1))

        state = hook.init(unreduced(jnp.zeros((N, D)), weights))
        keys = jax.random.split(jax.random.key(0), STEPS)
        state, squares = jit(lambda *args: jax.lax.scan(window, *args))(state, keys)
        return jax.device_get(state), float(jnp.mean(squares))


@pytest.mark.parametrize(
    "weights", [[4] * 8, [0, 1, 2, 3, 4, 5, 6, 11]], ids=["equal", "unequal-and-one-empty"]
)
def test_the_true_noise_scale_is_found(weights):
    total, rows = sum(weights), sum(w > 0 for w in weights)
    state, unweighted = simulate(weights)
    within = [5 * x for x in deviation(total, rows)]
    assert max(within) < 0.05
    got = [state.noise / S - 1, state.signal / G2 - 1, state.noise_scale / (S / G2) - 1]
    assert all(abs(x) < limit for x, limit in zip(got, within, strict=True)), (got, within)
    assert state.measurements == STEPS
    # The check tells the estimate from those of other formulas: dividing by n, no n' or weights.
    assert abs(state.noise * (rows - 1) / N / S - 1) > 2 * within[0]
    wrong = (unweighted - (G2 + S / total)) * total / (N - 1)
    right = sum(1 / w for w in weights if w > 0) / N * S + rows / N * G2  # E of `unweighted`
    off = ((right - G2 - S / total) * total / (N - 1)) / S - 1
    np.testing.assert_allclose(wrong / S - 1, off, atol=0.05)
    if rows < N:
        assert off > 0.15 > 4 * within[0]


def test_gradients_of_a_loss_with_examples_counted():
    """The rows of a whole window: two calls of 32 examples, four a device."""
    loss_fn = lambda w, x: jnp.mean(x @ w)  # noqa: E731
    x = np.random.default_rng(0).normal(1.0, 1.0, (2, 32, 5)).astype(np.float32)
    with jax.set_mesh(data_mesh(N)):
        grad_fn = gradaccum.unreduced_value_and_grad(loss_fn, axis_name="dp")
        tx = optax.chain(
            gradaccum.MultiSteps(
                optax.adam(1e-3), 2, axis_name="dp", comm_hook=gradient_noise_scale()
            )
        )
        w = jnp.zeros(5)
        state = tx.init(w)

        @jit
        def step(w, state, x):
            return tx.update(grad_fn(w, x)[1], state, w)[1]

        assert np.isnan(optax.tree.get(state, "noise_scale"))
        state = step(w, state, x[0])
        assert np.isnan(optax.tree.get(state, "noise_scale"))  # the window is open
        for call in (1, 0, 1):
            state = step(w, state, x[call])
    measured = state[0].comm_state
    rows = x.reshape(2, N, 4, 5).mean(axis=(0, 2))
    assert_measured(measured, rows, [8] * N)
    assert measured.measurements == 2
    assert float(optax.tree.get(state, "noise_scale")) == measured.noise_scale
    assert int(optax.tree.get(state, "count")) == 2  # Adam's, as without the hook


# --- The average ----------------------------------------------------------------------------------


def windows(hook, rows, weights, state=None):
    """Returns the states after each of some windows."""
    with jax.set_mesh(data_mesh(N)):
        call = jit(lambda r, w, s: hook(unreduced(r, w), s))
        state = hook.init(unreduced(rows[0], weights[0])) if state is None else state
        out = []
        for r, w in zip(rows, weights, strict=True):
            mean, state = call(r, jnp.asarray(w, jnp.float32), state)
            out.append((mean, jax.device_get(state)))
        return out


ROWS = np.random.default_rng(1).normal(0.7, 1, (4, N, 6)).astype(np.float32)
EVEN = [[2.0] * N] * 4


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9999])
def test_both_parts_are_averaged_without_bias(decay):
    parts = np.array([estimate(r, w) for r, w in zip(ROWS, EVEN, strict=True)])
    for t, (_, state) in enumerate(windows(gradient_noise_scale(decay=decay), ROWS, EVEN)):
        shares = decay ** np.arange(t, -1, -1.0)
        noise, signal = shares @ parts[: t + 1] / shares.sum()
        np.testing.assert_allclose([state.noise, state.signal], [noise, signal], rtol=1e-4)
        np.testing.assert_allclose(state.noise_scale, noise / signal, rtol=1e-4)
        assert state.measurements == t + 1


@pytest.mark.parametrize("first", [True, False], ids=["at-first", "later"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, "empty", "one-row"])
def test_a_window_that_shows_nothing_leaves_the_state_bitwise(bad, first):
    rows, weights = ROWS[:3].copy(), [list(w) for w in EVEN[:3]]
    at = 0 if first else 1
    if isinstance(bad, str):
        weights[at] = [float(bad == "one-row" and i == 3) for i in range(N)]
    else:
        rows[at, 3, 2] = bad
    states = windows(gradient_noise_scale(), rows, weights)
    before = states[0][1] if at else gradient_noise_scale().init(unreduced(rows[0], weights[0]))
    jax.tree.map(np.testing.assert_array_equal, states[at][1], jax.device_get(before))
    assert np.isnan(states[at][1].noise_scale) == first
    if not isinstance(bad, str):
        assert not np.isfinite(states[at][0][2])  # the mean shows it
    other = [i for i in range(3) if i != at]
    straight = windows(gradient_noise_scale(), rows[other], [weights[i] for i in other])
    jax.tree.map(np.testing.assert_array_equal, states[-1][1], straight[-1][1])


def test_a_gradient_that_cannot_be_told_from_noise_has_an_infinite_scale():
    signs = np.where(np.arange(N) % 2, 1, -1).astype(np.float32)[None, :, None] * ROWS[:1, :1]
    (_, state), *_ = windows(gradient_noise_scale(), signs, EVEN[:1])
    assert state.signal < 0 < state.noise
    assert np.isposinf(state.noise_scale)
    (_, state), *_ = windows(gradient_noise_scale(), 0 * signs, EVEN[:1])
    assert np.isposinf(state.noise_scale)
    # Without noise 0, not a little below.
    (_, state), *_ = windows(gradient_noise_scale(), 0 * ROWS[:1] + ROWS[:1, :1], EVEN[:1])
    assert 0 <= state.noise_scale < 1e-5


# --- Beside another hook --------------------------------------------------------------------------


class WithGradaccumMean:
    """A hook of a user's own: what it is given has nothing but means."""

    def init(self, given):
        assert all(not x.awaited.total for x in jax.tree.leaves(given, is_leaf=is_leaf))
        return ()

    def __call__(self, given, state):
        return gradaccum.mean(given), state


def is_leaf(x):
    return isinstance(x, gradaccum.Unreduced)


INNER = {
    "allreduce": hooks.allreduce(),
    "bf16": hooks.bf16_compress(),
    "fp16": hooks.fp16_compress(),
    "own": WithGradaccumMean(),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_the_mean_is_the_inner_hooks_in_the_same_reduction(inner):
    rows = {"w": jnp.asarray(ROWS[0]), "v": jnp.asarray(ROWS[1])}
    hook = gradient_noise_scale(inner)
    mesh = data_mesh(N)
    with jax.set_mesh(mesh):
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
        args = jax.device_put((rows, jnp.asarray(EVEN[0])), place)
        alone = jit(lambda r, w: inner(unreduced(r, w), ())[0]).lower(*args).compile()
        state = hook.init(unreduced(rows, EVEN[0]))
        with_it = jit(lambda s, r, w: hook(unreduced(r, w), s)).lower(state, *args).compile()
        mean, state = with_it(state, *args)
        jax.tree.map(np.testing.assert_array_equal, mean, alone(*args))
    flat = np.concatenate([ROWS[0], ROWS[1]], axis=1)
    assert_measured(state, flat, EVEN[0], within=2e-2 if inner in hooks_that_round() else 1e-4)
    gradaccum.audit.assert_one_reduction(with_it, axis_name="dp", mesh=mesh)
    sent = [gradaccum.audit.collectives(x, mesh=mesh).totals["dp"] for x in (alone, with_it)]
    assert sent[1].executions == sent[0].executions
    # Four scalars, of which XLA sees that one is the sum of weights, there anyway.
    assert sent[1].bytes == sent[0].bytes + 12


def hooks_that_round():
    return INNER["bf16"], INNER["fp16"]


def test_the_decorator_refuses_it_for_its_state():
    decorated = gradaccum.accumulate(
        lambda w, x: jnp.mean(x @ w),
        microbatches=1,
        axis_name="dp",
        mesh=data_mesh(N),
        comm_hook=gradient_noise_scale(),
    )
    with pytest.raises(ValueError, match="has a state of 4 arrays"):
        jax.grad(decorated)(jnp.zeros(3), jnp.ones((N, 3)))


@pytest.mark.parametrize("decay", [1.0, -0.1, np.nan])
def test_decay_is_checked(decay):
    with pytest.raises(ValueError, match=f"decay={decay}; required: 0 <= decay < 1"):
        gradient_noise_scale(decay=decay)


@pytest.mark.parametrize("hook", [None, hooks.allreduce, lambda x, s: (x, s)])
def test_the_hook_is_checked(hook):
    with pytest.raises(TypeError, match="is no communication hook; required: an instance"):
        gradient_noise_scale(hook)
