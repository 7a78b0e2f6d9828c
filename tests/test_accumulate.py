"""What the decorator does with arguments, aux, keys, batch gradients, dtypes and its cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.microbatching import AccumulationType as Kind

import gradaccum

B, D = 64, 4


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="module")
def on_mesh(mesh):
    return functools.partial(gradaccum.accumulate, axis_name="dp", mesh=mesh)


def arrays():
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(D, 3)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(B, D)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(B, 3)), jnp.float32)
    return w, x, y


def squared(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def assert_close(got, want, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def test_keeps_the_name_and_the_function(on_mesh):
    f = on_mesh(squared, microbatches=2)
    assert f.__name__ == "squared"
    assert f.__wrapped__ is squared
    assert repr(f) == "<gradaccum.accumulate(squared, microbatches=2)>"


def test_as_a_bare_decorator_of_a_method(on_mesh):
    class Model:
        scale = 2.0

        @on_mesh(microbatches=2, batch_argnums=(2, 3))
        def loss(self, w, x, y):
            return self.scale * squared(w, x, y)

    w, x, y = arrays()
    want = 2 * jax.grad(squared)(w, x, y)
    assert_close(jax.grad(Model().loss)(w, x, y), want)
    assert_close(Model().loss.value_and_grad()(w, x, y)[1], want)
    assert_close(Model().loss.value_and_grad((-3,))(w, x, y)[1][0], want)


def test_a_batch_argument_may_be_given_by_position_or_keyword(on_mesh):
    w, x, y = arrays()
    want = jax.grad(squared)(w, x, y)
    by_number = on_mesh(squared, microbatches=2, batch_argnums=(1, 2))
    by_name = on_mesh(squared, microbatches=2, batch_argnums=(), batch_argnames=("x", "y"))
    for f in (by_number, by_name):
        assert_close(jax.grad(f)(w, x, y), want)
        assert_close(jax.grad(f)(w, x, y=y), want)
        assert_close(jax.grad(f)(w, y=y, x=x), want)


def test_negative_batch_argnums_count_from_the_end(on_mesh):
    w, x, y = arrays()
    f = on_mesh(squared, microbatches=2, batch_argnums=(-2, -1))
    assert_close(jax.grad(f)(w, x, y), jax.grad(squared)(w, x, y))


def test_b4_b7_static_leaves_reach_the_loss_as_they_are(on_mesh):
    w, x, y = arrays()
    seen = []

    def loss_fn(params, batch, mode, *, train=False, activation=None, width=0):
        static = [params[name] for name in ("name", "none", "empty")]
        seen.append((mode, train, activation, width, *static))
        out = activation(batch["x"] @ params["w"])[:, :width]
        return jnp.mean((out - batch["y"][:, :width]) ** 2) * batch["scale"]

    f = on_mesh(loss_fn, microbatches=2)
    params = {"w": w, "name": "dense", "none": None, "empty": {}}
    batch = {"x": x, "y": y, "scale": jnp.float32(3)}  # of rank 0: no row of the batch's
    loss = f(params, batch, "b", train=False, activation=jnp.sin, width=3)
    assert seen == [("b", False, jnp.sin, 3, "dense", None, {})]
    assert_close(loss, 3 * jnp.mean((jnp.sin(x @ w) - y) ** 2))
    seen.clear()
    options = {"train": True, "activation": jnp.tanh, "width": 2}
    got = jax.grad(lambda w: f({**params, "w": w}, batch, "a", **options))(w)
    assert seen == [("a", True, jnp.tanh, 2, "dense", None, {})]
    want = jax.grad(lambda w: 3 * jnp.mean((jnp.tanh(x @ w)[:, :2] - y[:, :2]) ** 2))(w)
    assert_close(got, want)


def test_equal_static_values_of_different_types_do_not_share_a_program(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(lambda w, x, flag: jnp.mean(x @ w) * (2 if flag is True else 1), microbatches=2)
    assert_close(f(w, x, 1), jnp.mean(x @ w))
    assert_close(f(w, x, True), 2 * jnp.mean(x @ w))
    g = on_mesh(lambda w, x, s: jnp.mean(x @ w) * jnp.copysign(1.0, s), microbatches=2)
    assert_close(g(w, x, 0.0), -g(w, x, -0.0))


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
def test_batch_gradients_are_per_example_and_sharded_like_the_batch(on_mesh, mesh, weighted):
    w, x, y = arrays()
    weight_fn = (lambda x, y: jnp.float32(x.shape[0])) if weighted else None
    f = on_mesh(squared, microbatches=2, batch_argnums=(1, 2), weight_fn=weight_fn)
    got = jax.jit(jax.grad(f, argnums=(0, 1, 2)))(w, x, y)
    assert_close(got, jax.grad(squared, argnums=(0, 1, 2))(w, x, y))
    assert got[1].sharding == NamedSharding(mesh, P("dp"))
    assert_close(f.value_and_grad((2, 0))(w, x, y)[1], (got[2], got[0]))


def test_only_what_is_differentiated_is_accumulated(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(lambda p, x, q: jnp.mean(x @ p["w"] @ p["v"]) * q["s"].sum(), microbatches=2)
    p, q = {"w": w, "v": jnp.ones((3, 5000))}, {"s": jnp.ones((7000,))}
    program = str(jax.make_jaxpr(jax.grad(lambda w: f({**p, "w": w}, x, q)))(w))
    assert "psum" in program
    assert "5000]" in program  # the parameter itself is there
    assert not [line for line in program.split("\n") if "psum" in line and "000" in line]


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


def test_b8_integer_leaves_are_as_in_jax_grad(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(lambda p, b: jnp.mean(b @ p["w"]) * p["n"], microbatches=2)
    params = {"w": w, "n": jnp.int32(3)}
    with pytest.raises(TypeError, match="real- or complex-valued"):
        jax.grad(f)(params, x)
    grads = jax.grad(f, allow_int=True)(params, x)
    assert grads["n"].dtype == jax.dtypes.float0
    assert_close(grads["w"], 3 * jax.grad(lambda w: jnp.mean(x @ w))(w))


def test_complex_and_float64_accumulate_in_their_own_dtype():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x = jnp.asarray(rng.normal(size=(B, D)))
        for dtype in (jnp.complex64, jnp.float64, jnp.complex128):
            w = jnp.asarray(rng.normal(size=(D,)) + (1j if dtype != jnp.float64 else 0), dtype)
            loss_fn = lambda w, x: jnp.mean(jnp.abs(x.astype(w.dtype) @ w) ** 2)  # noqa: E731
            f = gradaccum.accumulate(loss_fn, microbatches=8, axis_name=None)
            loss, grad = jax.value_and_grad(f)(w, x)
            want_loss, want = jax.value_and_grad(loss_fn)(w, x)
            assert grad.dtype == dtype
            assert loss.dtype == want_loss.dtype
            assert_close((loss, grad), (want_loss, want), 1e-6 if dtype == jnp.complex64 else 1e-14)


def test_accumulator_and_reduce_dtypes(on_mesh):
    w, x, y = arrays()
    narrow = on_mesh(squared, microbatches=2, batch_argnums=(1, 2), reduce_dtype=jnp.bfloat16)
    program = str(jax.make_jaxpr(jax.grad(narrow))(w, x, y))
    assert "bf16[4,3]" in program
    assert_close(jax.grad(narrow)(w, x, y), jax.grad(squared)(w, x, y), 2e-2)
    low = gradaccum.accumulate(
        lambda w, x: jnp.mean(x * w), microbatches=1024, axis_name=None,
        accumulator_dtype=jnp.bfloat16, loss_reduction="sum",
    )  # fmt: skip
    high = gradaccum.accumulate(
        lambda w, x: jnp.mean(x * w), microbatches=1024, axis_name=None, loss_reduction="sum"
    )
    one = jnp.ones((), jnp.bfloat16)
    assert float(jax.grad(high)(one, jnp.ones(1024, jnp.bfloat16))) == 1024
    assert float(jax.grad(low)(one, jnp.ones(1024, jnp.bfloat16))) == 256  # D1: it stops there


def test_the_loss_keeps_its_dtype(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(lambda w, x: jnp.mean(x @ w).astype(jnp.bfloat16), microbatches=2)
    loss, grad = jax.value_and_grad(f)(w, x)
    assert loss.dtype == jnp.bfloat16
    assert grad.dtype == jnp.float32


def test_the_outer_cotangent_scales_the_gradient(on_mesh):
    w, x, y = arrays()
    f = on_mesh(squared, microbatches=2, batch_argnums=(1, 2))
    got = jax.grad(lambda w: jnp.sin(3 * f(w, x, y)))(w)
    assert_close(got, jax.grad(lambda w: jnp.sin(3 * squared(w, x, y)))(w))


def test_a_python_float_as_the_cotangent(on_mesh):
    w, x, y = arrays()
    f = on_mesh(squared, microbatches=2, batch_argnums=(1, 2))
    (grad,) = jax.vjp(lambda w: f(w, x, y), w)[1](2.0)
    assert_close(grad, 2 * jax.grad(squared)(w, x, y))


def test_a_loss_may_change_its_dicts(on_mesh):
    def loss_fn(w, batch):
        x = batch.pop("x")
        batch["x"] = 2 * x
        return jnp.mean(batch["x"] @ w)

    w, x, _ = arrays()
    assert_close(on_mesh(loss_fn, microbatches=2)(w, {"x": x}), 2 * jnp.mean(x @ w))


def test_b13_one_trace_for_many_calls(on_mesh):
    w, x, y = arrays()
    count = []

    def counted(w, x, y):
        count.append(1)
        return squared(w, x, y)

    f = on_mesh(counted, microbatches=2, batch_argnums=(1, 2))
    for _ in range(3):
        f(w, x, y)
    assert len(count) == 1
    for _ in range(3):
        jax.value_and_grad(f)(w, x, y)
    assert len(count) == 2
    for _ in range(3):  # decorated anew: the same program
        jax.grad(on_mesh(counted, microbatches=2, batch_argnums=(1, 2)))(w, x, y)
    assert len(count) == 2
    step = jax.jit(jax.grad(f))
    for _ in range(3):
        step(w, x, y)
    assert len(count) == 3


def test_a_traced_call_keeps_nothing_alive(on_mesh):
    w, x, y = arrays()

    @jax.jit
    def step(w, x, y, scale):
        loss = on_mesh(
            lambda w, x, y: squared(w, x, y) * scale, microbatches=2, batch_argnums=(1, 2)
        )
        return jax.grad(loss)(w, x, y)

    with jax.check_tracer_leaks():
        assert_close(step(w, x, y, 2.0), 2 * jax.grad(squared)(w, x, y))


def test_value_and_grad_takes_python_floats_and_checks_argnums(on_mesh):
    f = on_mesh(lambda w, x: jnp.mean(w * x), microbatches=2)
    loss, grad = f.value_and_grad()(3.0, jnp.ones(16))
    assert (float(loss), float(grad)) == (3.0, 1.0)
    with pytest.raises(TypeError, match=r"value_and_grad\(argnums=2\) of a call with 2"):
        f.value_and_grad(2)(3.0, jnp.ones(16))
    with pytest.raises(TypeError, match=r"args\[0\]\['n'\] is dtype int32"):
        f.value_and_grad()({"n": jnp.int32(1)}, jnp.ones(16))


def test_a_loss_of_an_empty_parameter_tree(on_mesh):
    f = on_mesh(lambda p, x: jnp.mean(x), microbatches=2)
    assert jax.grad(f)({}, jnp.ones(16)) == {}
    assert float(f(None, jnp.ones(16))) == 1.0


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by-value"])
def test_float16_inside_a_float32_loss_neither_underflows_nor_overflows(fused):
    def loss_fn(w, x):
        def layer(h, w):
            return (h.astype(jnp.float16) * w.astype(jnp.float16)).astype(jnp.float32), None

        return 1e-4 * jnp.sum(jax.lax.scan(layer, x, w)[0])

    w, x = jnp.ones((1,)), jnp.ones((1024,))
    f = gradaccum.accumulate(loss_fn, microbatches=1024, axis_name=None, fused=fused)
    np.testing.assert_allclose(jax.grad(f)(w, x), [1e-4], rtol=2e-3)
    heavy = gradaccum.accumulate(
        lambda w, x: 1e6 * loss_fn(w, x), microbatches=2, axis_name=None, fused=fused,
        weight_fn=lambda x: jnp.float32(4096),
    )  # fmt: skip
    np.testing.assert_allclose(jax.grad(heavy)(w, x[:2]), [100.0], rtol=2e-3)


def test_weight_fn_takes_the_batch_in_the_order_of_the_losss_parameters(on_mesh):
    seen = []

    def loss_fn(w, tokens, mask, *, extra):
        return jnp.sum(w * tokens * mask) / jnp.sum(mask) + 0 * extra.sum()

    def weight_fn(tokens, mask, extra):
        seen.append(f"{tokens.dtype} {mask.dtype} {extra.dtype}")
        return mask.sum()

    f = on_mesh(
        loss_fn, microbatches=1, batch_argnums=(1, 2), batch_argnames="extra", weight_fn=weight_fn
    )
    tokens, mask = jnp.arange(16.0), jnp.arange(16) % 3 > 0
    loss = f(1.0, mask=mask, extra=jnp.ones(16, jnp.bfloat16), tokens=tokens)
    assert seen == ["float32 bool bfloat16"]
    np.testing.assert_allclose(loss, tokens[mask].mean(), rtol=1e-6)


def test_a_named_key_may_be_none(on_mesh):
    w, x, _ = arrays()
    f = on_mesh(lambda w, x, key: jnp.mean(x @ w), microbatches=2, key_argnums=2)
    assert_close(f(w, x, None), jnp.mean(x @ w))


def test_parameters_given_by_keyword_are_no_forgotten_batch(on_mesh):
    f = on_mesh(lambda w, x: jnp.mean(x) * w.sum(), microbatches=2)
    assert float(f(w=jnp.ones(16), x=jnp.ones(16))) == 16
