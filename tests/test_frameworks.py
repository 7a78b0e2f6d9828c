"""Losses of Haiku, Flax linen, Flax nnx and Equinox pass through unchanged."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from optax.microbatching import AccumulationType as Kind

import gradaccum


@pytest.fixture(scope="module")
def decorate():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))

    def of(fun, **options):
        return gradaccum.accumulate(fun, microbatches=2, axis_name="dp", mesh=mesh, **options)

    return of


def batch():
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.normal(size=(32, 5)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=(32, 3)), jnp.float32),
    }


def assert_close(got, want, tolerance=1e-5):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-6))


def test_haiku_with_rng_and_state(decorate):
    def net(x, is_training):
        x = hk.Linear(8)(x)
        ema = hk.ExponentialMovingAverage(0.9)
        ema(jnp.mean(x, axis=0))
        x = hk.dropout(hk.next_rng_key(), 0.0, jnp.tanh(x)) if is_training else jnp.tanh(x)
        return hk.Linear(3)(x)

    model = hk.transform_with_state(net)
    data = batch()
    params, state = model.init(jax.random.key(0), data["x"], True)

    def loss_fn(params, state, rng, batch):
        out, state = model.apply(params, state, rng, batch["x"], True)
        return jnp.mean((out - batch["y"]) ** 2), state

    means = jax.tree.map(lambda x: Kind.MEAN if x.dtype == jnp.float32 else Kind.SUM, state)
    f = decorate(loss_fn, batch_argnums=3, key_argnums=2, has_aux=True, aux_accumulator=means)
    rng = jax.random.key(1)
    (loss, got), grads = jax.value_and_grad(f, has_aux=True)(params, state, rng, data)
    (want_loss, want), want_grads = jax.value_and_grad(loss_fn, has_aux=True)(
        params, state, rng, data
    )
    assert_close((loss, grads), (want_loss, want_grads))
    floats = [(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
              if b.dtype == jnp.float32]  # fmt: skip
    assert floats
    assert_close([a for a, _ in floats], [b for _, b in floats])


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x))
        x = nn.Dropout(0.5, deterministic=not train)(nn.tanh(x))
        return nn.Dense(3)(x)


def test_n12_linen_batch_norm_makes_one_moving_average_update_a_step(decorate):
    model, data = LinenNet(), batch()
    variables = model.init(jax.random.key(0), data["x"], train=False)

    def loss_fn(params, stats, batch):
        out, new = model.apply(
            {"params": params, "batch_stats": stats}, batch["x"], train=True,
            mutable=["batch_stats"], rngs={"dropout": jax.random.key(0)},
        )  # fmt: skip
        return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

    f = decorate(loss_fn, batch_argnums=2, has_aux=True)
    params, stats = variables["params"], variables["batch_stats"]
    (_, got), _ = jax.value_and_grad(f, has_aux=True)(params, stats, data)
    hidden = np.asarray(nn.Dense(8).apply({"params": params["Dense_0"]}, data["x"]))
    parts = hidden.reshape(16, 2, 8)  # the microbatches: 8 devices x 2
    np.testing.assert_allclose(
        got["BatchNorm_0"]["mean"], 0.1 * hidden.mean(0), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        got["BatchNorm_0"]["var"], 0.9 + 0.1 * parts.var(1).mean(0), rtol=1e-4
    )


def test_linen_without_batch_norm_in_a_train_state(decorate):
    from flax.training import train_state

    model, data = nn.Dense(3), batch()
    params = model.init(jax.random.key(0), data["x"])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))

    def loss_fn(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    def step(state, batch, fun):
        return state.apply_gradients(grads=jax.grad(fun)(state.params, batch))

    ours, plain = state, state
    run = jax.jit(step, static_argnums=2)
    f = decorate(loss_fn)
    for _ in range(3):
        ours, plain = run(ours, data, f), run(plain, data, loss_fn)
    assert_close(ours.params, plain.params)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.act = nnx.tanh

    def __call__(self, x):
        return self.last(self.act(self.first(x)))


def test_nnx_value_and_grad(decorate):
    model, data = NnxNet(nnx.Rngs(0)), batch()

    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(decorate(loss_fn))(model, data)
    want_loss, want = nnx.value_and_grad(loss_fn)(model, data)
    assert_close((loss, grads), (want_loss, want))
    jitted = nnx.jit(nnx.value_and_grad(decorate(loss_fn)))(model, data)
    assert_close(jitted, (want_loss, want))


class NnxDropout(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(5, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def test_b22_nnx_state_that_the_loss_changes_is_refused(decorate):
    model, data = NnxDropout(nnx.Rngs(0)), batch()

    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    f = decorate(loss_fn, key_argnums=0)
    with pytest.raises(ValueError, match=r"changed an argument in place, a NnxDropout.*nnx.merge"):
        nnx.value_and_grad(f)(model, data)
    with pytest.raises(ValueError, match="changed an argument in place"):
        f(model, data)
    model.eval()
    assert_close(f(model, data), loss_fn(model, data))


def test_b22_nnx_dropout_by_split_and_merge(decorate):
    """A key of its own for every step, folded for every microbatch."""
    model, data = NnxDropout(nnx.Rngs(params=0, dropout=1)), batch()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, key, batch):
        model = nnx.merge(graph, params, rest)
        nnx.reseed(model, dropout=key)
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    f = decorate(loss_fn, batch_argnums=3, key_argnums=(1, 2))
    step = jax.jit(jax.value_and_grad(f))
    keys = jax.random.split(jax.random.key(0), 2)
    (one, grads), (two, _) = (step(params, rest, key, data) for key in keys)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert float(one) != float(two)
    assert float(one) == float(step(params, rest, keys[0], data)[0])
    shared = decorate(loss_fn, batch_argnums=3, key_argnums=())
    assert float(one) != float(jax.jit(shared)(params, rest, keys[0], data))


class NnxNorm(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(5, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


def test_n12_nnx_batch_norm_statistics_come_back_as_aux(decorate):
    model, data = NnxNorm(nnx.Rngs(0)), batch()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, batch):
        model = nnx.merge(graph, params, rest)
        loss = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    f = decorate(loss_fn, batch_argnums=2, has_aux=True)
    (_, got), _ = jax.jit(jax.value_and_grad(f, has_aux=True))(params, rest, data)
    hidden = np.asarray(model.linear(data["x"]))
    np.testing.assert_allclose(got["norm"]["mean"][...], 0.1 * hidden.mean(0), rtol=1e-4, atol=1e-6)


class EqxNet(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    act: callable
    depth: int

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(5, 8, key=a), eqx.nn.Linear(8, 3, key=b)
        self.act, self.depth = jax.nn.tanh, 2

    def __call__(self, x):
        return self.last(self.act(self.first(x)))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_b9_equinox_filter_value_and_grad(decorate, jit):
    model, data = EqxNet(jax.random.key(0)), batch()

    def loss_fn(model, batch):
        assert model.depth == 2  # static inside, as it was
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    grad = eqx.filter_value_and_grad(decorate(loss_fn))
    got = (eqx.filter_jit(grad) if jit else grad)(model, data)
    assert_close(
        jax.tree.leaves(eqx.filter(got, eqx.is_array)),
        jax.tree.leaves(eqx.filter(eqx.filter_value_and_grad(loss_fn)(model, data), eqx.is_array)),
    )
