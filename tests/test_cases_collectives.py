"""Cases of `shard_map` and collectives: a loss, by hand as others had it wrong, and decorated."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from optax.microbatching import AccumulationType as Kind

import gradaccum
from gradaccum import audit

N, X, W = 8, np.arange(16, dtype=np.float32), np.float32(2)
RIGHT = 7.5  # the gradient of mean(w * x)
WHOLE = P()
jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)
VMA = pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])


def loss_fn(w, x):
    return jnp.mean(w * x)


def region(fun, check_vma=True, out_specs=WHOLE):
    """Returns the function of (w, x) on 8 devices, w replicated and x split."""
    specs = {"in_specs": (WHOLE, P("dp")), "out_specs": out_specs}
    return jit(jax.shard_map(fun, mesh=helpers.data_mesh(N), check_vma=check_vma, **specs))


def decorate(fun, k=2, n=N, **options):
    return gradaccum.accumulate(fun, microbatches=k, mesh=helpers.data_mesh(n), **options)


# Inside a region of one's own.
inner = gradaccum.accumulate(loss_fn, microbatches=2, axis_name="dp")


def test_v1_a_mean_of_gradients_that_are_summed_already():
    """Typed, the gradient of what is replicated is a sum over devices: n times too large."""
    by_hand = region(lambda w, x: jax.lax.pmean(jax.grad(loss_fn)(w, x), "dp"))
    assert float(by_hand(W, X)) == N * RIGHT
    for grad in (jax.grad(inner), lambda w, x: jax.lax.pmean(jax.grad(inner)(w, x), "dp")):
        assert float(region(grad)(W, X)) == RIGHT
    assert float(jit(jax.grad(decorate(loss_fn, check_vma=True)))(W, X)) == RIGHT


@pytest.mark.parametrize("inside", [True, False], ids=["through-the-cast", "of-the-cast"])
def test_v1_parameters_that_vary_are_refused(inside):
    """A mean as the cotangent of n values: what casts them would sum it up, n times too large."""

    def cast(w):
        return jax.lax.pcast(w, "dp", to="varying")

    def grad(w, x):
        return jax.grad(lambda w: inner(cast(w), x))(w) if inside else jax.grad(inner)(cast(w), x)

    match = r"w, float32\[\].* varies over the data axis dp: .* a jax\.lax\.pcast of them is"
    with pytest.raises(ValueError, match=match):
        region(grad)(W, X)


def test_v2_no_sum_in_the_body_of_the_loop():
    """Typed, by hand: the value is right, and reduced once for each microbatch."""

    def by_hand(w, x):
        body = lambda g, rows: (g + jax.grad(loss_fn)(w, rows), None)  # noqa: E731
        return jax.lax.scan(body, jnp.zeros(()), x.reshape(2, -1))[0] / (2 * N)

    def executions(fun):
        compiled = fun.lower(W, X).compile()
        assert float(compiled(W, X)) == RIGHT
        return [row.executions for row in audit.collectives(compiled)]

    assert executions(region(by_hand)) == [2]
    assert executions(region(jax.grad(inner))) == [1]
    assert executions(jit(jax.grad(decorate(loss_fn, check_vma=True)))) == [1]


def test_v3_one_reduction_for_each_dtype():
    """Counted in the compiled program; test_collectives.py counts each leaf's in the traced one."""

    def loss_fn(p, x):
        out = x @ p["a"] + x @ p["b"] + x @ p["half"].astype(jnp.float32)
        return jnp.mean(out), jnp.int32(x.shape[0])

    params = {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}
    params["half"] = jnp.ones(3, jnp.bfloat16)
    fun = decorate(loss_fn, has_aux=True, aux_accumulator=Kind.SUM)
    x = np.ones((64, 3), np.float32)
    compiled = jit(jax.value_and_grad(fun, has_aux=True)).lower(params, x).compile()
    audit.assert_one_reduction(compiled, axis_name="dp")
    rows = {row.dtype: (row.kind, row.bytes, row.executions) for row in audit.collectives(compiled)}
    # bfloat16 leaves are accumulated, and so reduced, in float32; with them the loss
    assert rows == {"f32": ("all-reduce", 4 * (3 * 3 + 1), 1), "s32": ("all-reduce", 4, 1)}
    assert len(audit.collectives(compiled)) == 2
    (_, count), grads = compiled(params, x)
    assert int(count) == 64
    assert [str(g.dtype) for g in jax.tree.leaves(grads)] == ["float32", "float32", "bfloat16"]


def test_v5_differentiating_through_the_final_mean():
    """Untyped, by hand: each device's own gradient, silently."""

    def each(fun):
        grad = lambda w, x: jax.grad(fun)(w, x)[None]  # noqa: E731
        return region(grad, False, P("dp"))(W, X).tolist()

    mean = lambda w, x: jax.lax.pmean(loss_fn(w, x), "dp")  # noqa: E731
    assert each(mean) == [2 * i + 0.5 for i in range(N)]
    assert each(inner) == [RIGHT] * N
    assert each(lambda w, x: jax.lax.pmean(inner(w, x), "dp")) == [RIGHT] * N


def from_zeros(w, x):
    """The carry does not vary over devices until the first row is in it."""

    def cell(h, row):
        return jnp.tanh(row @ w + h), None

    return jnp.mean(jax.lax.scan(cell, jnp.zeros((x.shape[0], 3)), jnp.swapaxes(x, 0, 1))[0] ** 2)


def recomputed(w, x):
    body = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None))
    return jnp.mean(jax.lax.scan(body, x[:, 0], length=2)[0] ** 2)


def penalised(w, x):
    """The inner gradients are of the closed-over parameter, and of the batch."""
    score = lambda w, row: jnp.sum(jnp.tanh(row @ w) ** 2)  # noqa: E731
    adapt = lambda rows: w - 0.1 * jax.grad(score)(w, rows[:1])  # noqa: E731
    slopes = jax.vmap(jax.grad(lambda rows: score(w, rows)))(x)
    return jnp.mean(jax.vmap(lambda rows: score(adapt(rows), rows[1:]))(x)) + jnp.mean(slopes**2)


CUBE = {"w": helpers.normal(0, 3, 3) / 2, "x": helpers.normal(1, 8, 2, 3)}
CUBE = {n: x.astype(np.float32) for n, x in CUBE.items()}


@functools.cache
def expected(fun):
    return jit(jax.value_and_grad(fun))(CUBE["w"], CUBE["x"])


def assert_right(fun, **options):
    got = jit(jax.value_and_grad(decorate(fun, n=2, **options)))(CUBE["w"], CUBE["x"])
    helpers.assert_close(got, expected(fun))


def test_v6_a_scan_that_starts_from_zeros():
    """Ordinary, and no program where types are checked."""
    assert_right(from_zeros)
    with pytest.raises(TypeError, match="carry"):
        jax.eval_shape(jax.grad(decorate(from_zeros, n=2, check_vma=True)), CUBE["w"], CUBE["x"])


@VMA
def test_v12_inner_gradients_of_a_closed_over_parameter(check_vma):
    assert_right(penalised, check_vma=check_vma)


@VMA
def test_v21_a_checkpoint_in_a_scan(check_vma):
    assert_right(recomputed, check_vma=check_vma)


@pytest.mark.parametrize("fused", [True, False])
def test_v9_v10_v11_accumulators_take_any_variance(fused):
    """Typed: one parameter varies, one does not, and some devices skip a microbatch.

    By hand a carry from zeros, a second cast, and a branch of zeros are each an error.
    """

    def loss_fn(p, batch):
        x = p["a"] * p["b"] * batch["x"] * batch["mask"]
        return jnp.sum(x) / jnp.sum(batch["mask"])

    mask = np.array([1, 0] * 4 + [0, 0] + [1, 1] * 3, np.float32)
    fun = gradaccum.accumulate(
        loss_fn, microbatches=2, axis_name="dp", weight_fn=helpers.count_tokens, fused=fused
    )

    def grad(w, batch):
        b = jax.lax.pcast(w, "dp", to="varying")
        loss, grads = fun.value_and_grad()({"a": w, "b": b}, batch)
        return loss, grads["a"], grads["b"][None]

    got = region(grad, True, (P(), P(), P("dp")))(W, {"x": X, "mask": mask})
    mean = float(np.sum(X * mask) / np.sum(mask))
    want = 4 * mean, 2 * mean, [2 * mean] * N
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@VMA
def test_v19_samplers_that_loop(check_vma):
    """`gamma` rejects in a while loop, whose carry does not vary until the key is in it."""

    def loss_fn(w, x, key):
        one, other = jax.random.split(key)
        drawn = jax.random.gamma(one, 2.0, x.shape)
        drawn = drawn * jax.random.choice(other, jnp.arange(1.0, 4), x.shape)
        return jnp.mean(w * x * drawn), drawn

    options = {"has_aux": True, "aux_accumulator": Kind.CONCAT, "key_argnums": 2}
    fun = decorate(loss_fn, check_vma=check_vma, **options)
    grad, drawn = jit(jax.grad(fun, has_aux=True))(W, X, jax.random.key(0))
    assert np.all(drawn > 0)
    assert len(set(drawn.tolist())) == 16
    np.testing.assert_allclose(grad, np.mean(X * drawn), rtol=1e-6)


def test_v20_no_reduction_of_a_scattered_gradient_in_the_loop():
    """So that no pass has one to hoist; rows repeat within and across microbatches."""
    ids = np.arange(32, dtype=np.int32) % 5
    fun = decorate(lambda table, ids: jnp.sum(table[ids]), k=4, n=4, loss_reduction="sum")
    table = np.ones((7, 2), np.float32)
    compiled = jit(jax.grad(fun)).lower(table, ids).compile()
    assert [(r.executions, r.loops) for r in audit.collectives(compiled)] == [(1, ())]
    want = np.bincount(ids, minlength=7)[:, None] * np.ones((1, 2))
    np.testing.assert_array_equal(compiled(table, ids), want)
