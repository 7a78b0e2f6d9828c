"""What the decorator does with aux, each kind of it, and with PRNG keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import squared_loss
from optax.microbatching import AccumulationType as Kind
from squared_loss import B, D, arrays, assert_close

import gradaccum


@pytest.fixture(scope="module")
def on_mesh():
    return squared_loss.on_mesh()


AUX = {"mean": Kind.MEAN, "count": Kind.SUM, "rows": Kind.CONCAT, "hit": Kind.SUM}


def with_aux(w, x):
    out = x @ w
    hit = out[:, 0] > 0
    aux = {"mean": jnp.mean(out, 0), "count": hit.sum(), "rows": out, "hit": jnp.any(hit)}
    return jnp.mean(out**2), aux


def test_aux_by_kind(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(with_aux, microbatches=4, has_aux=True, aux_accumulator=AUX)
    (loss, aux), grads = jax.jit(jax.value_and_grad(f, has_aux=True))(w, x)
    (want_loss, want), want_grads = jax.value_and_grad(with_aux, has_aux=True)(w, x)
    assert_close((loss, grads), (want_loss, want_grads))
    assert_close(aux["mean"], want["mean"])
    assert_close(aux["rows"], want["rows"])
    assert int(aux["count"]) == int(want["count"])
    assert aux["count"].dtype == want["count"].dtype
    assert int(aux["hit"]) == int(sum(jnp.any(r) for r in (x @ w)[:, 0].reshape(32, 2) > 0))
    value, aux_alone = f(w, x)
    assert_close((value, aux_alone["rows"]), (want_loss, want["rows"]))
    (_, again), _ = f.value_and_grad()(w, x)
    assert_close(again["mean"], want["mean"])


def test_mean_aux_is_weighted_like_the_loss_and_a_skipped_microbatch_adds_nothing(on_mesh):
    x = jnp.arange(16.0)
    mask = (jnp.arange(16) % 3 > 0) & (jnp.arange(16) // 2 != 3)

    def loss_fn(w, x, mask):
        mean = jnp.sum(x * mask) / jnp.sum(mask)  # 0 / 0 in one microbatch
        return w * mean, {"x": mean, "n": mask.sum()}

    f = on_mesh(
        loss_fn, microbatches=1, batch_argnums=(1, 2), has_aux=True,
        aux_accumulator={"x": Kind.MEAN, "n": Kind.SUM}, weight_fn=lambda x, mask: mask.sum(),
    )  # fmt: skip
    (loss, aux), grad = jax.value_and_grad(f, has_aux=True)(2.0, x, mask)
    want = float(x[mask].mean())
    np.testing.assert_allclose([loss, aux["x"], grad], [2 * want, want, want], rtol=1e-6)
    assert int(aux["n"]) == int(mask.sum())


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_aux_and_loss_may_be_constants(on_mesh, kind):
    f = on_mesh(lambda w, x: (2.5, {"a": 1.5}), microbatches=2, has_aux=True, aux_accumulator=kind)
    (loss, aux), grad = jax.value_and_grad(f, has_aux=True)(jnp.ones(3), jnp.ones(16))
    assert float(loss) == 2.5
    assert grad.tolist() == [0, 0, 0]
    want = {Kind.SUM: 1.5 * 16, Kind.CONCAT: [1.5] * 16}.get(kind, 1.5)
    assert aux["a"].tolist() == want


def test_large_integer_sums_stay_exact(on_mesh):
    f = on_mesh(
        lambda w, x: (jnp.mean(x) * w, jnp.int32(2**24 + 1)),
        microbatches=2, has_aux=True, aux_accumulator=Kind.SUM,
    )  # fmt: skip
    assert int(f(1.0, jnp.ones(16))[1]) == 16 * (2**24 + 1)


def test_small_integers_are_summed_in_int32(on_mesh):
    f = on_mesh(
        lambda w, x: (jnp.mean(x) * w, jnp.int8(100)),
        microbatches=2, has_aux=True, aux_accumulator=Kind.SUM,
    )  # fmt: skip
    assert int(f(1.0, jnp.ones(16))[1]) == 1600


@pytest.mark.parametrize("use", [lambda a: a["mean"].sum(), lambda a: a["rows"].sum()])
def test_differentiating_through_aux_raises(on_mesh, use):
    w, x, _ = arrays()
    f = on_mesh(with_aux, microbatches=2, has_aux=True, aux_accumulator=AUX)
    with pytest.raises(TypeError, match="the auxiliary output was differentiated"):
        jax.grad(lambda w: use(f(w, x)[1]))(w)
    with pytest.raises(TypeError, match="the auxiliary output was differentiated"):
        jax.jit(jax.grad(lambda w: f(w, x)[0] + use(f(w, x)[1])))(w)
    jax.grad(lambda w: f(w, x)[0] + jax.lax.stop_gradient(use(f(w, x)[1])))(w)


def keyed(w, x, key):
    return jnp.mean(x @ w), jax.random.key_data(key)[None]


@pytest.mark.parametrize("raw", [False, True], ids=["typed", "raw"])
def test_r1_keys_are_folded_with_the_global_microbatch_index(on_mesh, raw):
    w, x, _ = arrays()
    key = jax.random.PRNGKey(7) if raw else jax.random.key(7)
    fun = (lambda w, x, key: (jnp.mean(x @ w), key[None])) if raw else keyed
    f = on_mesh(fun, microbatches=2, has_aux=True, aux_accumulator=Kind.CONCAT, key_argnums=2)
    got = f(w, x, key)[1]
    folded = [jax.random.fold_in(key, i) for i in range(16)]
    want = np.stack([k if raw else jax.random.key_data(k) for k in folded])
    np.testing.assert_array_equal(got, want)


def test_dropout_does_not_depend_on_how_the_microbatches_are_spread(on_mesh):
    w, x, _ = arrays()

    def dropout(w, x, key):
        return jnp.mean((x @ w) ** 2 * jax.random.bernoulli(key, 0.5, (x.shape[0], 1)))

    key = jax.random.key(0)
    spread = on_mesh(dropout, microbatches=2, key_argnames="key")
    alone = gradaccum.accumulate(dropout, microbatches=16, axis_name=None, key_argnums=2)
    assert_close(jax.grad(spread)(w, x, key), jax.grad(alone)(w, x, key=key))


def test_arrays_of_keys_and_keys_in_a_tree_are_folded(on_mesh):
    w, x, _ = arrays()

    def loss_fn(w, x, rngs):
        rows = jax.random.key_data(jnp.stack([rngs["dropout"], *rngs["more"]]))
        return jnp.mean(x @ w), rows[None]

    rngs = {"dropout": jax.random.key(0), "more": jax.random.split(jax.random.key(1), 2)}
    f = on_mesh(
        loss_fn, microbatches=1, has_aux=True, aux_accumulator=Kind.CONCAT, key_argnames="rngs"
    )
    rows = np.asarray(f(w, x, rngs)[1]).reshape(-1, 2)
    assert len(np.unique(rows, axis=0)) == 8 * 3


def test_per_example_keys_are_batch(on_mesh):
    w, x, _ = arrays()
    keys = jax.random.split(jax.random.key(0), B)

    def loss_fn(w, batch):
        noise = jax.vmap(lambda k: jax.random.normal(k, (D,)))(batch["key"])
        return jnp.mean((batch["x"] + noise) @ w)

    batch = {"x": x, "key": keys}
    f = on_mesh(loss_fn, microbatches=2)
    assert_close(jax.grad(f)(w, batch), jax.grad(loss_fn)(w, batch))


def test_a_shared_key_is_shared_when_said_so(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(keyed, microbatches=2, has_aux=True, aux_accumulator=Kind.CONCAT, key_argnums=())
    assert len(np.unique(np.asarray(f(w, x, jax.random.key(0))[1]), axis=0)) == 1


def test_a_named_key_may_be_none(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(lambda w, x, key: jnp.mean(x @ w), microbatches=2, key_argnums=2)
    assert_close(f(w, x, None), jnp.mean(x @ w))
