"""The program's schedules against their formulas, and one update of its optimizers by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from absl_apps import optimizers

PEAK = 0.4


def rates(count, warmup_steps, steps, shape):
    schedule = optimizers.make_schedule(PEAK, warmup_steps, steps, shape)
    return np.asarray(jax.vmap(schedule)(np.arange(count)))


def falling(shape, part):
    """The rate after a part, 0 to 1, of the steps that follow the warmup."""
    return {
        "cosine": PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2),
        "linear": PEAK * (1 - 0.9 * part),
        "constant": PEAK,
    }[shape]


########################################### Schedules ############################################


@pytest.mark.parametrize("shape", optimizers.SCHEDULES)
@pytest.mark.parametrize(
    ("warmup_steps", "warmup", "steps"),
    [(0, 0, 12), (4, 4, 12), (None, 3, 39), (None, 0, 9), (1, 1, 1), (11, 11, 12), (12, 12, 12)],
    ids=["none", "some", "a-tenth", "a-tenth-of-few", "one-of-one", "all-but-one", "all"],
)
def test_schedules_are_their_formulas(shape, warmup_steps, warmup, steps):
    want = [PEAK * (step + 1) / (warmup + 1) for step in range(warmup)]
    want += [falling(shape, step / (steps - warmup)) for step in range(steps - warmup)]
    np.testing.assert_allclose(rates(steps, warmup_steps, steps, shape), want, rtol=2e-6)


@pytest.mark.parametrize("shape", optimizers.SCHEDULES)
def test_a_schedule_stays_at_its_end(shape):
    """A rate past the last step is asked for by nobody, but must not rise again, as cosines do."""
    after = rates(40, 4, 12, shape)[12:]
    np.testing.assert_allclose(after, falling(shape, 1.0), rtol=2e-6)


@pytest.mark.parametrize("shape", optimizers.SCHEDULES)
def test_the_peak_is_reached_and_never_passed(shape):
    every = rates(50, None, 50, shape)
    assert every[5] == np.float32(PEAK) == every.max()
    assert every[0] == pytest.approx(PEAK / 6)
    assert np.all(np.diff(every[:6]) > 0)
    assert np.all(np.diff(every[5:]) <= 0)


def test_schedule_counts_steps():
    schedule = optimizers.make_schedule(peak=1.0, warmup_steps=4, steps=12)
    rates = [float(schedule(jnp.asarray(step))) for step in range(13)]
    np.testing.assert_allclose(rates[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates[8], (1 + 0.1) / 2, rtol=1e-6)
    np.testing.assert_allclose(rates[12], 0.1, rtol=1e-6)
    assert (
        float(optimizers.make_schedule(peak=1.0, warmup_steps=0, steps=12)(jnp.asarray(0))) == 1.0
    )
    defaults = optimizers.make_schedule(peak=1.0, warmup_steps=None, steps=40)
    np.testing.assert_allclose(defaults(jnp.asarray(4)), 1.0, rtol=1e-6)


######################################### One update #############################################

PARAMS = {"a": np.array([1.0, -2.0]), "b": np.array([3.0])}
GRADS = {"a": np.array([3.0, -4.0]), "b": np.array([12.0])}  # of norm 13
DEFAULT_DECAY = {"adamw": 1e-4, "lion": 1e-3, "sgd": 0.0}  # of optax


def first_updates(name, grads, rate=0.5, **given):
    """The first updates of float64 parameters."""
    with jax.enable_x64(True):
        tx = optimizers.make_optimizer(name, optax.constant_schedule(rate), **given)
        params, grads = jax.tree.map(jnp.asarray, (PARAMS, grads))
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        return jax.device_get(updates)


def direction(name, g):
    """What the first step goes against: the gradient; its sign, where moments begin at zero."""
    return {"sgd": g, "lion": np.sign(g), "adamw": g / (np.abs(g) + 1e-8)}[name]


@pytest.mark.parametrize("name", sorted(optimizers.LEARNING_RATES))
@pytest.mark.parametrize(
    ("clip_norm", "scale"), [(None, 1 / 13), (2.6, 0.2), (13.5, 1.0), (0.0, 1.0)], ids=str
)
def test_a_gradient_is_clipped_to_its_global_norm(name, clip_norm, scale):
    """Not leaf by leaf; by default to 1; not at all by 0, nor where it is short."""
    given = {} if clip_norm is None else {"clip_norm": clip_norm}
    got = first_updates(name, GRADS, **given)
    for leaf, g in GRADS.items():
        want = -0.5 * (direction(name, scale * g) + DEFAULT_DECAY[name] * PARAMS[leaf])
        np.testing.assert_allclose(got[leaf], want, rtol=1e-9)


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_weight_decay_is_decoupled_and_neither_clipped_nor_normalised(name, decay):
    got = first_updates(name, GRADS, weight_decay=decay)
    for leaf, g in GRADS.items():
        want = -0.5 * (direction(name, g / 13) + decay * PARAMS[leaf])
        np.testing.assert_allclose(got[leaf], want, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "second"),
    [
        # Of a gradient 1 and then -3: m = 0.9 * 1 - 3.
        ("sgd", -(0.9 - 3)),
        # The sign of 0.9 m - 0.1 * 3, with m = 0.01 * 1.
        ("lion", 1.0),
        # m = 0.09 - 0.3, v = 0.95 * 0.05 + 0.05 * 9, each over 1 - beta^2.
        ("adamw", -((0.09 - 0.3) / 0.19) / math.sqrt((0.0475 + 0.45) / 0.0975)),
    ],
)
def test_the_second_update_shows_the_moments(name, second):
    """Momentum 0.9 of sgd; betas 0.9 and 0.95 of adamw, 0.9 and 0.99 of lion."""
    given = {} if name == "sgd" else {"weight_decay": 0.0}
    with jax.enable_x64(True):
        tx = optimizers.make_optimizer(name, optax.constant_schedule(1.0), clip_norm=0.0, **given)
        x = jnp.zeros(1)
        _, state = tx.update(jnp.ones(1), tx.init(x), x)
        updates, _ = tx.update(jnp.full(1, -3.0), state, x)
    np.testing.assert_allclose(updates, [second], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(optimizers.LEARNING_RATES))
def test_an_update_is_of_its_own_steps_rate(name):
    given = {} if name == "sgd" else {"weight_decay": 0.0}
    schedule = optimizers.make_schedule(PEAK, 2, 6, "linear")
    tx = optimizers.make_optimizer(name, schedule, clip_norm=0.0, **given)
    unit = optimizers.make_optimizer(name, optax.constant_schedule(1.0), clip_norm=0.0, **given)
    x = jnp.zeros(1)
    state, unit_state = tx.init(x), unit.init(x)
    for step in range(6):
        g = jnp.full(1, 1.0 + step)
        updates, state = tx.update(g, state, x)
        ones, unit_state = unit.update(g, unit_state, x)
        np.testing.assert_allclose(updates / ones, [schedule(step)], rtol=1e-5)


@pytest.mark.parametrize("name", sorted(optimizers.LEARNING_RATES))
def test_every_optimizer_descends(name):
    tx = optimizers.make_optimizer(name, optimizers.make_schedule(0.05, None, 100))

    @jax.jit
    def descend(x):
        def body(carry, _):
            x, state = carry
            updates, state = tx.update(2 * x, state, x)
            return (optax.apply_updates(x, updates), state), None

        return jax.lax.scan(body, (x, tx.init(x)), length=100)[0][0]

    assert np.all(np.abs(descend(jnp.array([1.0, -1.0]))) < 0.2)
