"""What the decorator does with arguments, batch gradients, cotangents and its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import squared_loss
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from squared_loss import arrays, assert_close, squared


@pytest.fixture(scope="module")
def mesh():
    return squared_loss.mesh()


@pytest.fixture(scope="module")
def on_mesh():
    return squared_loss.on_mesh()


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


def test_parameters_given_by_keyword_are_no_forgotten_batch(on_mesh):
    f = on_mesh(lambda w, x: jnp.mean(x) * w.sum(), microbatches=2)
    assert float(f(w=jnp.ones(16), x=jnp.ones(16))) == 16
