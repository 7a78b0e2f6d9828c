"""Loss and gradients of the decorated loss against one full batch, in float64 and other dtypes."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scalar_losses import ONE, rows, run

FACTORS = {
    "k": (1, 2, 4, 8),
    "n": (1, 2, 8),
    "dtype": ("float32", "bfloat16", "float16"),
    "reduction": ("mean", "tokens", "sum"),
    "fused": (True, False),
    "overlap": (True, False),
    "unroll": (1, 2),
    "method": (True, False),
    "axis": ("Auto", "Explicit"),
}
GRID = [
    {"model": model} | case
    for seed, model in enumerate(helpers.MODELS)
    for case in helpers.pairwise(FACTORS, seed)
]


def name_of(case):
    flags = [name for name in ("fused", "overlap", "method") if case[name]]
    sizes = [f"{name}{case[name]}" for name in ("k", "n", "unroll")]
    return "-".join([case["model"], *sizes, case["dtype"], case["reduction"], *flags, case["axis"]])


@pytest.mark.parametrize("case", GRID, ids=name_of)
def test_equals_one_full_batch_in_float64(case):
    loss_fn = helpers.accumulated(
        case["model"],
        case["reduction"],
        microbatches=case["k"],
        mesh=helpers.data_mesh(case["n"], getattr(jax.sharding.AxisType, case["axis"])),
        fused=case["fused"],
        overlap=case["overlap"],
        unroll=case["unroll"],
    )
    params, batch = helpers.init(case["model"], case["dtype"]), helpers.make_batch()
    fun = loss_fn.value_and_grad() if case["method"] else jax.value_and_grad(loss_fn)
    got = jax.jit(fun, compiler_options=helpers.COMPILE_FAST)(params, batch)
    want = helpers.reference(case["model"], case["reduction"], params, batch)
    assert {str(g.dtype) for g in jax.tree.leaves(got[1])} == {case["dtype"]}
    helpers.assert_close(got, want, case["dtype"])


def test_the_grid_holds_every_pair():
    """Each model by itself meets all pairs of all other factors."""
    names = list(FACTORS)
    for model in helpers.MODELS:
        cases = [c for c in GRID if c["model"] == model]
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                met = {(c[a], c[b]) for c in cases}
                assert len(met) == len(FACTORS[a]) * len(FACTORS[b]), (model, a, b)


# --- Precision -----------------------------------------------------------------------------------


def test_d1_a_thousand_bfloat16_gradients_add_up():
    """In a bfloat16 accumulator 1,024 ones stop at 256: a mean of 0.25."""
    batch = rows(*[1] * 1024)
    loss_fn = lambda w, batch: jnp.mean(w * batch["x"].astype(w.dtype))  # noqa: E731
    w = jnp.bfloat16(1)
    assert float(run(loss_fn, w, batch, microbatches=1024)[1]) == 1
    narrow = run(loss_fn, w, batch, microbatches=1024, loss_reduction="sum",
                 accumulator_dtype=jnp.bfloat16)  # fmt: skip
    assert float(narrow[1]) == 256


def test_d3_bfloat16_parameters_with_float32_arithmetic():
    """The gradient's dtype inside is not the parameter's; what returns has the parameter's."""
    w = jnp.array([1.5, -2], jnp.bfloat16)
    batch = {"x": jnp.arange(8.0).reshape(4, 2)}
    loss_fn = lambda w, batch: jnp.mean(batch["x"] @ w.astype(jnp.float32))  # noqa: E731
    _, grad = run(loss_fn, w, batch)
    assert grad.dtype == jnp.bfloat16
    assert grad.tolist() == [3, 4]


@pytest.mark.parametrize("fused", [True, False])
def test_weights_are_not_rounded_to_the_dtype_of_the_loss(fused):
    """257 is no bfloat16: rounded to 256, the two gradients would cancel."""

    def loss_fn(p, batch):
        h, _ = jax.lax.scan(lambda h, w: (h * w, None), batch["x"], p["layers"])
        return jnp.mean(h * p["w"]).astype(jnp.bfloat16)

    batch = rows(1, -256, weight=[257.0, 1.0])
    params = {"layers": jnp.ones(2), "w": ONE}
    weigh = lambda batch: batch["weight"][0]  # noqa: E731
    loss, grads = run(loss_fn, params, batch, weight_fn=weigh, fused=fused)
    want = (257 - 256) / 258
    assert loss.dtype == jnp.bfloat16
    np.testing.assert_allclose(float(loss), want, rtol=2**-8)
    for g in jax.tree.leaves(grads):
        np.testing.assert_allclose(g, want, rtol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_float64_stays_float64(fused):
    with jax.enable_x64(True):
        params = helpers.init("transformer", "float64")
        batch = helpers.make_batch()
        batch = {n: x.astype(np.float64) if x.dtype == np.float32 else x for n, x in batch.items()}
        loss_fn = helpers.accumulated(
            "transformer", "tokens", microbatches=4, mesh=helpers.data_mesh(2), fused=fused
        )
        got = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
        want = helpers.reference("transformer", "tokens", params, batch)
        assert {g.dtype for g in jax.tree.leaves(got)} == {np.dtype(np.float64)}
        helpers.assert_close(got, want)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_complex_parameters_as_jax_grad(weighted, fused):
    """JAX's convention, the conjugate of the mathematicians' gradient, is kept."""
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(rng.normal(size=s) + 1j * rng.normal(size=s), jnp.complex64)  # noqa: E731
    params = {"layers": draw(2, 3, 3) / 2, "out": draw(3)}
    batch = {"x": draw(16, 3), "mask": jnp.asarray(rng.integers(0, 2, 16), jnp.float32)}

    def loss_fn(p, batch):
        h, _ = jax.lax.scan(lambda h, w: (h @ w, None), batch["x"], p["layers"])
        losses = jnp.abs(h @ p["out"]) ** 2
        mask = batch["mask"] if weighted else jnp.ones_like(batch["mask"])
        return jnp.sum(mask * losses) / jnp.sum(mask)

    options = {"weight_fn": helpers.count_tokens} if weighted else {}
    got = run(loss_fn, params, batch, microbatches=4, fused=fused, **options)
    helpers.assert_close(got, jax.value_and_grad(loss_fn)(params, batch))
    assert {g.dtype for g in jax.tree.leaves(got[1])} == {np.dtype(np.complex64)}


# --- Ordinary losses that have been rejected, or wrong, elsewhere --------------------------------


def own_rule(params, batch):
    """A rule that is not the derivative of what it stands for: it must be used as it is."""

    @jax.custom_vjp
    def straight_through(x):
        return jnp.round(x)

    straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (2 * ct,))
    h = straight_through(batch["x"][:, 0] @ params["layers"][0])
    return jnp.mean((h @ params["layers"][1]) ** 2)


def gradient_penalty(params, batch):
    """An inner gradient with respect to each example, of layers that are scanned."""

    def score(x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(w @ h), None), x, params["layers"])
        return jnp.sum(h**2)

    slopes = jax.vmap(jax.grad(score))(batch["x"][:, 0])
    return jnp.mean(jnp.sum(slopes**2, axis=-1)) + jnp.mean(jax.vmap(score)(batch["x"][:, 0]))


def meta_learning(params, batch):
    """An inner gradient with respect to the parameter itself, a step along it for each example."""

    def score(layers, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(w @ h), None), x, layers)
        return jnp.sum(h**2)

    def adapted(x):
        step = jax.grad(score)(params["layers"], x[0])
        return score(params["layers"] - 0.1 * step, x[1])

    return jnp.mean(jax.vmap(adapted)(batch["x"]))


def checkpointed_loop(params, batch):
    body = jax.checkpoint(lambda i, h: jnp.tanh(h @ params["layers"][i]))
    return jnp.mean(jax.lax.fori_loop(0, 2, body, batch["x"][:, 0]) ** 2)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "loss_fn",
    [own_rule, gradient_penalty, meta_learning, checkpointed_loop],
    ids=lambda f: f.__name__,
)
def test_v6_v12_v21_ordinary_losses(loss_fn, fused):
    params = {"layers": jnp.asarray(helpers.normal(1, 2, helpers.D, helpers.D) / 2, jnp.float32)}
    batch = helpers.make_batch()
    got = run(
        loss_fn,
        params,
        batch,
        microbatches=4,
        axis_name="dp",
        mesh=helpers.data_mesh(2),
        fused=fused,
    )
    helpers.assert_close(got, jax.value_and_grad(loss_fn)(params, batch))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_v20_gradients_of_a_lookup_count_each_row(dtype):
    """Scattered additions, of rows that repeat within and across microbatches: exact numbers."""
    ids = np.random.default_rng(0).integers(0, 5, 32, dtype=np.int32)
    loss_fn = lambda table, batch: jnp.sum(table[batch].astype(jnp.float32))  # noqa: E731
    _, grad = run(
        loss_fn,
        jnp.ones((7, 2), dtype),
        ids,
        microbatches=4,
        axis_name="dp",
        mesh=helpers.data_mesh(4),
        loss_reduction="sum",
    )
    np.testing.assert_array_equal(
        grad.astype(np.float32), np.repeat(np.bincount(ids, minlength=7)[:, None], 2, axis=1)
    )
