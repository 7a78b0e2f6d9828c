"""What `MultiSteps` does with NaN, skips and windows that are not full, and what it refuses."""

import functools
import itertools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import MultiSteps, Unreduced

MESH = helpers.data_mesh(8)
ON = {"axis_name": "dp", "mesh": MESH}
SGD = optax.sgd(1.0)
SKIP = {"should_skip_update_fn": optax.skip_not_finite}
WAYS = ["plain", "rows", "local", "local typed"]
NAN = float("nan")


def calls(way, tx, values, weights=None, params=0.0):
    """Gives a scalar parameter's gradients, `[calls, 8]`: one for each device.

    Returns:
      The updates and the state after each call; inside a shard_map, those of all 8 devices.
    """
    values = np.asarray(values, np.float32)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, np.float32)
    params = jnp.float32(params)
    if way != "plain":
        params = jax.device_put(params, NamedSharding(MESH, P()))
    state, typed = tx.init(params), way == "local typed"
    update = tx.update
    if way.startswith("local"):
        specs = jax.tree.map(lambda x: x.sharding.spec, state)
        axes = {"in_specs": (P("dp"), specs, P()), "out_specs": (P(), specs, P("dp"))}

        def own(g, state, params):
            updates, state = tx.update(g[0], state, params)
            counts = jnp.stack([state.mini_step, state.gradient_step, state.updated])[None]
            return updates, state, jax.lax.pcast(counts, "dp", to="varying") if typed else counts

        update = jax.shard_map(own, mesh=MESH, check_vma=typed, **axes)
    step, after = jax.jit(update), []
    for value, weight in zip(values, weights, strict=True):
        grads = {
            "plain": lambda v, w: jnp.asarray((v * w).sum() / w.sum()),
            "rows": lambda v, w: Unreduced(v * w, w, "dp"),
        }.get(way, lambda v, _: v)(value, weight)
        updates, state, *counts = step(grads, state, params)
        for each in counts:
            assert len({tuple(row) for row in np.asarray(each).tolist()}) == 1
        params = optax.apply_updates(params, updates)
        after.append((float(updates), jax.device_get(state)))
    return after


# --- NaN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, np.inf], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_o1_a_nan_does_not_outlive_its_window(way, bad):
    """On one device, in mid-window; the sum is set to zeros, not multiplied by 0."""
    values = np.ones((6, 8))
    values[1, 3] = bad
    after = calls(way, MultiSteps(SGD, 3, **({} if way == "plain" else ON)), values)
    updates = [u for u, _ in after]
    assert not np.isfinite(updates[2])
    assert updates[:2] + updates[3:] == [0, 0, 0, 0, -1]
    assert [int(s.mini_step) for _, s in after] == [1, 2, 0, 1, 2, 0]
    assert not np.any(after[2][1].acc_grads)
    if way == "plain":
        theirs = optax.MultiSteps(SGD, 3)
        assert not np.isfinite(calls(way, theirs, values)[5][0])


def test_o7_plain_gradients_are_skipped_call_by_call():
    """Of seven calls the second does not count: neither in the sum nor in what divides it."""
    values = np.arange(1.0, 8)[:, None] * np.ones(8)
    values[1, 0] = NAN
    after = calls("plain", MultiSteps(SGD, 3, **SKIP), values)
    assert [int(s.mini_step) for _, s in after] == [1, 1, 2, 0, 1, 2, 0]
    np.testing.assert_allclose([u for u, _ in after], [0, 0, 0, -8 / 3, 0, 0, -6], rtol=1e-6)
    assert [bool(s.skip_state["should_skip"]) for _, s in after] == [False, True, *[False] * 5]


@pytest.mark.parametrize("k", [1, 3])
def test_o8_a_skipped_call_leaves_the_state_bitwise(k):
    """The call that would close a window too: only what is said of the skip itself changes."""
    tx = MultiSteps(optax.adam(0.5), k, **SKIP)
    values = np.broadcast_to([[1.0]] * (2 * k - 1) + [[NAN]], (2 * k, 8))
    *_, (_, before), (update, after) = calls("plain", tx, values)
    assert update == 0
    assert (bool(after.skip_state["should_skip"]), bool(tx.has_updated(after))) == (True, False)
    kept = before._replace(skip_state=after.skip_state, updated=after.updated)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(after), strict=True):
        assert a.tobytes() == b.tobytes()
    *_, (_, unskipped) = calls("plain", MultiSteps(optax.adam(0.5), k), values)
    assert np.isnan(unskipped.inner_opt_state[0].mu)


@pytest.mark.parametrize("way", WAYS[1:])
def test_o6_o8_a_window_whose_mean_is_skipped_is_dropped(way):
    """A NaN on one device: all devices decide alike, and the inner state stays as it was."""
    values = np.ones((8, 8))
    values[2, 5] = NAN
    tx = MultiSteps(optax.adam(0.5), 2, **SKIP, **ON)
    after = calls(way, tx, values)
    assert [int(s.gradient_step) for _, s in after] == [0, 1, 1, 1, 1, 2, 2, 3]
    assert [int(s.mini_step) for _, s in after] == [1, 0] * 4
    assert [bool(tx.has_updated(s)) for _, s in after] == [i in (1, 5, 7) for i in range(8)]
    assert [bool(s.skip_state["should_skip"]) for _, s in after] == [i in (3, 4) for i in range(8)]
    assert [u != 0 for u, _ in after] == [i in (1, 5, 7) for i in range(8)]
    for a, b in zip(*(jax.tree.leaves(after[i][1].inner_opt_state) for i in (1, 4)), strict=True):
        assert a.tobytes() == b.tobytes()
    for leaf in jax.tree.leaves((after[3][1].acc_grads, after[3][1].weight)):
        assert not np.any(leaf)


def test_it_is_the_mean_that_is_judged():
    """16 on one device is a mean of 2."""
    fn = functools.partial(optax.skip_large_updates, max_squared_norm=5.0)
    values = [[16.0, *[0] * 7], [24.0, *[0] * 7]]
    after = calls("rows", MultiSteps(SGD, 1, should_skip_update_fn=fn, **ON), values)
    assert [u for u, _ in after] == [-2, 0]
    assert [float(s.skip_state["norm_squared"]) for _, s in after] == [4, 9]


@pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])
def test_o6_the_decision_is_one_over_a_manual_model_axis(typed):
    """Only one model shard of one data device's gradient is NaN. Its skip_state is the user's."""
    mesh = layouts.mesh_of({"dp": 4, "mp": 2})

    def skip(grads, step, params):
        bad = optax.skip_not_finite(grads, step, params)[0]
        return bad, jax.lax.psum(bad.astype(jnp.int32), "mp")

    options = {"axis_name": "dp", "mesh": mesh}
    params = jax.device_put(jnp.zeros(6), NamedSharding(mesh, P("mp")))
    state = MultiSteps(optax.adam(0.5), 2, **options).init(params)
    state = state._replace(skip_state=jnp.int32(0))  # `skip` itself wants the axis
    tx = MultiSteps(optax.adam(0.5), 2, should_skip_update_fn=skip, **options)
    specs = jax.tree.map(lambda x: P("mp") if x.shape == (6,) else P(), state)
    specs = specs._replace(acc_grads=P("dp", "mp"), weight=P("dp"))

    def step(poison, state, params):
        grads = poison[0] + jnp.ones_like(params)
        updates, state = tx.update(grads, state, params)
        counts = jnp.stack([state.mini_step, state.gradient_step, state.updated])[None, :, None]
        counts = jax.lax.pcast(counts, ("dp", "mp"), to="varying") if typed else counts
        return updates, state, counts

    step = jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=(P("dp", "mp"), specs, P("mp")), check_vma=typed,
        out_specs=(P("mp"), specs, P("dp", None, "mp")),
    ))  # fmt: skip
    for i, want in enumerate([[1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 1, 1]]):
        poison = np.zeros((4, 6), np.float32)
        poison[2, 4] = NAN if i == 0 else 0
        updates, state, counts = step(poison, state, params)
        np.testing.assert_array_equal(counts, np.broadcast_to(np.array(want)[:, None], (4, 3, 2)))
        assert np.all(np.asarray(updates) != 0) == (i == 3)
        assert int(state.skip_state) == (1 if i in (1, 2) else 0)


def test_o6_the_decision_is_one_where_each_device_holds_its_shard_of_the_mean():
    """FSDP inside a shard_map of one's own: the infinity is in the first device's shard."""
    specs, params = {"w": P("dp")}, {"w": np.ones((8, 4), np.float32)}
    params = jax.device_put(params, NamedSharding(MESH, P("dp")))
    grad = gradaccum.unreduced_value_and_grad(
        lambda p, x: jnp.mean(x @ p["w"]), axis_name="dp", in_specs=(specs, P("dp"))
    )
    tx = MultiSteps(optax.adam(0.5), 2, **SKIP, **ON)
    state = tx.init(params)
    rows = jax.tree.map(lambda x: x.sharding.spec, state)

    def step(params, state, x):
        updates, state = tx.update(grad(params, x)[1], state, params)
        return optax.apply_updates(params, updates), state, state.gradient_step[None]

    step = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=(specs, rows, P("dp")),
                                 out_specs=(specs, rows, P("dp")), check_vma=False))  # fmt: skip
    for i, want in enumerate([0, 0, 0, 1]):
        x = np.ones((16, 8), np.float32)
        x[0, 0] = np.inf if i == 0 else 1
        params, state, steps = step(params, state, x)
        assert steps.tolist() == [want] * 8


def test_has_updated_is_true_after_an_update_and_no_other_call():
    """Not in a new state, nor after a skipped call that follows an update, where optax's is."""
    values = np.broadcast_to([[1], [1], [NAN], [NAN], [1], [1]], (6, 8))
    for k, want in ((1, [1, 1, 0, 0, 1, 1]), (2, [0, 1, 0, 0, 0, 1])):
        tx, theirs = MultiSteps(SGD, k, **SKIP), optax.MultiSteps(SGD, k, **SKIP)
        assert not tx.has_updated(tx.init(0.0))
        assert [bool(tx.has_updated(s)) for _, s in calls("plain", tx, values)] == want
        assert [bool(theirs.has_updated(s)) for _, s in calls("plain", theirs, values)] != want
    inner = MultiSteps(SGD, 2)
    nested = MultiSteps(inner, 2, **ON)
    after = calls("rows", nested, np.ones((8, 8)))
    assert [bool(nested.has_updated(s)) for _, s in after] == [i in (3, 7) for i in range(8)]
    assert [u for u, _ in after] == [-1 * (i in (3, 7)) for i in range(8)]


# --- Windows that are not full -------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("way", WAYS[:3])
def test_flush(way, compiled):
    """The mean over the calls that the window holds: weighted, where they have weights."""
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(5, 8)), rng.integers(0, 5, (5, 8))
    weights = weights if way == "rows" else None
    for mean in (True, False):
        tx = MultiSteps(
            optax.sgd(1.0, momentum=0.5), 3, use_grad_mean=mean, **(ON if way != "plain" else {})
        )
        *_, (_, state) = after = calls(way, tx, values, weights)
        before = after[2][0]
        params = jax.device_put(np.float32(0), NamedSharding(MESH, P()))
        flush = jax.jit(tx.flush) if compiled else tx.flush
        updates, flushed = flush(jax.tree.map(jnp.asarray, state), params)
        w = np.ones((5, 8)) if weights is None else weights
        last = (values * w)[3:].sum() / w[3:].sum() * (1 if mean else 2)
        np.testing.assert_allclose(updates, 0.5 * before - last, rtol=1e-5)
        assert (int(flushed.mini_step), int(flushed.gradient_step)) == (0, 2)
        assert bool(tx.has_updated(flushed))
        nothing, again = flush(flushed, params)
        assert float(nothing) == 0
        assert not tx.has_updated(again)
        assert not np.any(jax.tree.leaves(flushed.acc_grads)[0])
        jax.tree.map(np.testing.assert_array_equal, again, flushed._replace(updated=False))


def test_epochs_shorter_than_k():
    tx, params = MultiSteps(SGD, 4), jnp.float32(0)
    state, seen = tx.init(params), []
    for epoch, value in itertools.product(range(2), (1, 3)):
        updates, state = tx.update(jnp.float32(value + epoch), state, params)
        assert float(updates) == 0
        if value == 3:
            updates, state = tx.flush(state, params)
            seen.append((float(updates), int(state.gradient_step)))
    assert seen == [(-2, 1), (-3, 2)]


def test_a_flushed_window_may_be_dropped_too():
    tx = MultiSteps(optax.adam(1.0), 3, **SKIP, **ON)
    (_, state), *_ = calls("rows", tx, [[NAN] * 8])
    updates, flushed = jax.jit(tx.flush)(state, jnp.float32(0))
    assert (float(updates), int(flushed.mini_step), int(flushed.gradient_step)) == (0, 0, 0)
    assert (bool(flushed.skip_state["should_skip"]), bool(flushed.updated)) == (True, False)


def test_flush_wants_the_parameters_of_init():
    params = {"a": np.ones(3), "b": np.ones(2)}
    tx = MultiSteps(SGD, 2, **ON)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"MultiSteps.flush: params have the structure PyTreeDef"):
        tx.flush(state, {"a": params["a"]})
    with pytest.raises(ValueError, match=r"\['b'\] has \(5,\), its accumulator \(2,\)"):
        tx.flush(state, params | {"b": np.ones(5)})
    bare = MultiSteps(SGD, 2, axis_name="dp")
    with pytest.raises(ValueError, match=r"MultiSteps.flush: no mesh, and 8 devices"):
        jax.jit(bare.flush)(state, params)
