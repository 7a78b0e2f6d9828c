"""`unreduced_value_and_grad`: its values, options and dtypes, against one full batch."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from helpers import assert_close
from optax.microbatching import AccumulationType as Kind
from unreduced_rows import ON_MESH, N, is_rows, jit, leaves_of, make, unreduced

import gradaccum

# --- Values --------------------------------------------------------------------------------------


CASES = [("dense", k, reduction) for k in (1, 4) for reduction in ("mean", "sum", "tokens")]
CASES += [("transformer", 2, "sum"), ("tied_embedding", 2, "tokens")]


@pytest.mark.parametrize(("model", "k", "reduction"), CASES)
def test_the_mean_is_the_full_batch(model, k, reduction):
    """Rows count examples, or tokens: some microbatches have none, their loss is 0/0."""
    params, batch, want = make(model, reduction)
    loss, grads = jit(unreduced(model, reduction, microbatches=k))(params, batch)
    assert {x.sum.shape[0] for x in leaves_of((loss, grads))} == {N}
    weight = {
        "mean": np.full(N, helpers.B / N),
        "sum": np.full(N, 1 / N),
        "tokens": batch["mask"].reshape(N, -1).sum(1),
    }[reduction]
    for x in leaves_of((loss, grads)):
        np.testing.assert_array_equal(x.weight, weight.astype(np.float32))
    assert_close(gradaccum.mean((loss, grads)), want)


@pytest.mark.parametrize("k", [1, 2])
def test_a_row_is_what_one_device_adds_up(k):
    """sum[d] = the sum of its microbatches' weighted gradients."""
    params, batch, _ = make(reduction="tokens")
    loss, grads = jit(unreduced(reduction="tokens", microbatches=k))(params, batch)
    for d in range(N):
        rows = jax.tree.map(lambda x, d=d: x[d * 8 : (d + 1) * 8], batch)
        tokens = rows["mask"].sum()
        own = jax.tree.map(lambda x, d=d: x.sum[d], (loss, grads), is_leaf=is_rows)
        want = helpers.reference("dense", "tokens", params, rows)
        want = jax.tree.map(lambda x, w=tokens: x * w if w else np.zeros_like(x), want)
        assert_close(own, want)


def test_weights_that_are_all_zero_give_zeros():
    params, batch, _ = make()
    batch["mask"] = np.zeros_like(batch["mask"])
    got = gradaccum.mean(unreduced(reduction="tokens", microbatches=2)(params, batch))
    assert_close(got, jax.tree.map(np.zeros_like, got))


@pytest.mark.parametrize(("n", "reduction"), [(3, "sum"), (8, "mean")])
def test_float64_stays_exact(n, reduction):
    """Of 3 devices 1/n is no float32."""
    params, batch, _ = make()
    with jax.enable_x64(True):
        cut = jax.tree.map(lambda x: np.asarray(x[:48], np.float64), batch)
        cut |= {"ids": batch["ids"][:48], "targets": batch["targets"][:48]}
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        want = jax.device_get(jax.value_and_grad(helpers.loss_of("dense", reduction))(params, cut))
        rows = unreduced("dense", reduction, microbatches=2, mesh=helpers.data_mesh(n))(params, cut)
        got = gradaccum.mean(rows)
    assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype(np.float64)}
    assert_close(got, want)


LOOPS = {
    "overlap": {"overlap": True},
    "unrolled by value": {"unroll": 2, "fused": False},
    "typed": {"check_vma": True},
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_loops_options_change_no_value(name):
    params, batch, want = make("transformer", "tokens")
    fun = unreduced("transformer", "tokens", microbatches=4, **LOOPS[name])
    assert_close(gradaccum.mean(jit(fun)(params, batch)), want)


AUX = {
    "mean": Kind.MEAN,
    "half": Kind.MEAN,
    "sum": Kind.SUM,
    "count": Kind.SUM,
    "rows": Kind.CONCAT,
    "none": None,
}


def with_aux(params, batch):
    h = jnp.tanh(batch["x"][:, 0] @ params["w1"])
    return jnp.mean(helpers.dense(params, batch)), {
        "mean": jnp.mean(h),
        "half": jnp.mean(h).astype(jnp.bfloat16),
        "sum": jnp.sum(h),
        "count": jnp.int32(16_777_217),  # no float32
        "rows": h,
        "none": None,
    }


def test_aux_awaits_its_mean_or_its_sum_or_nothing():
    params, batch, want = make()
    fun = gradaccum.unreduced_value_and_grad(
        with_aux, has_aux=True, aux_accumulator=AUX, microbatches=2, **ON_MESH
    )
    (loss, aux), grads = jit(fun)(params, batch)
    rows, none = aux.pop("rows"), aux.pop("none")
    assert none is None
    assert "awaiting its sum, by gradaccum.mean" in repr(aux["count"])
    h = np.tanh(batch["x"][:, 0].astype(np.float64) @ np.asarray(params["w1"], np.float64))
    assert_close(rows, h)
    got = gradaccum.mean((loss, aux, grads))
    full = {"mean": h.mean(), "half": h.mean(), "sum": h.sum(), "count": np.int32(16 * 16_777_217)}
    assert int(got[1].pop("count")) == full.pop("count")
    assert got[1]["half"].dtype == jnp.bfloat16
    assert_close(got, (want[0], full, want[1]))
    twice = gradaccum.mean(gradaccum.add(aux, aux))
    assert int(twice["count"]) == np.int32(32 * 16_777_217)
    assert_close(twice["mean"], h.mean())


def test_the_mean_of_a_sum_has_means_of_its_aux():
    """MEAN aux counts microbatches, whatever the loss does."""

    def loss_fn(params, batch):
        losses = helpers.dense(params, batch)
        return jnp.sum(losses), jnp.mean(losses)

    params, batch, want = make(reduction="sum")
    fun = gradaccum.unreduced_value_and_grad(
        loss_fn, has_aux=True, loss_reduction="sum", microbatches=2, **ON_MESH
    )
    (loss, aux), grads = gradaccum.mean(jit(fun)(params, batch))
    assert_close((loss, grads), want)
    assert_close(aux, want[0] / (helpers.B * helpers.T))


def test_keys_are_folded_as_the_decorator_folds_them():
    params, batch, want = make()

    def loss_fn(params, batch, key):
        mask = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return jnp.mean(helpers.dense(params, batch | {"x": batch["x"] * mask}))

    options = {"microbatches": 2, "key_argnums": 2, **ON_MESH}
    decorated = gradaccum.accumulate(loss_fn, **options)
    fun = gradaccum.unreduced_value_and_grad(loss_fn, **options)
    args = params, batch, jax.random.key(3)
    dropped = jit(jax.value_and_grad(decorated))(*args)
    assert_close(gradaccum.mean(jit(fun)(*args)), jax.device_get(dropped))
    assert abs(float(dropped[0]) - want[0]) > 0.01 * want[0]
    shared = gradaccum.unreduced_value_and_grad(loss_fn, **ON_MESH)
    with pytest.raises(ValueError, match=r"key: a PRNG key that every microbatch and device would"):
        shared(*args)


ARGNUMS = {"one": 0, "two": (0, 1), "exchanged": (1, 0), "from the end": -1, "none": ()}


@pytest.mark.parametrize("name", ARGNUMS)
def test_arguments_are_differentiated_as_by_jax(name):
    """The parameters are nested, with None and an array of no size; the batch goes by keyword."""

    def loss_fn(scale, params, batch):
        h = jnp.tanh(batch["x"][:, 0] @ params["pair"][0]) * scale
        return jnp.mean((h @ params["pair"][1] - batch["y"]) ** 2)

    pair = [helpers.normal(i, *s).astype(np.float32) for i, s in enumerate(((4, 5), (5, 3)))]
    params = {"pair": tuple(pair), "none": None, "of no size": np.zeros((0, 3), np.float32)}
    args, batch, argnums = (0.5, params), helpers.make_batch(), ARGNUMS[name]
    fun = gradaccum.unreduced_value_and_grad(
        loss_fn, argnums, batch_argnums=(), batch_argnames="batch", **ON_MESH
    )
    loss, grads = gradaccum.mean(jit(fun)(*args, batch=batch))
    nums = [n % 2 for n in np.atleast_1d(argnums).astype(int)]
    value = functools.partial(loss_fn, batch=batch)
    want = jax.grad(value, (0, 1))(*args)
    want = [want[n] for n in nums]
    got = [grads] if isinstance(argnums, int) else list(grads)
    assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, want)
    assert got == [] or all(isinstance(g, dict) == (n == 1) for g, n in zip(got, nums, strict=True))
    sized = lambda tree: [x for x in jax.tree.leaves(tree) if x.size]  # noqa: E731
    assert_close([loss, *sized(got)], jax.device_get([value(*args), *sized(want)]))


# --- Dtypes --------------------------------------------------------------------------------------

DTYPES = {
    # parameters, options -> rows, what crosses the devices, mean
    "float32": (np.float32, {}, "float32", "float32", "float32"),
    "bfloat16": (jnp.bfloat16, {}, "float32", "float32", "bfloat16"),
    "bfloat16 accumulator": (
        np.float32, {"accumulator_dtype": "bfloat16"}, "bfloat16", "bfloat16", "float32",
    ),
    "bfloat16 on the wire": (
        np.float32, {"reduce_dtype": "bfloat16"}, "float32", "bfloat16", "float32",
    ),
    "complex": (np.complex64, {"reduce_dtype": "bfloat16"}, *["complex64"] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_of_rows_wire_and_mean(name):
    dtype, options, rows, wire, mean = DTYPES[name]
    params, batch = helpers.init("dense", dtype), helpers.make_batch()

    def loss_fn(params, batch):
        return jnp.mean(jnp.abs(helpers.dense(params, batch)))

    options = ON_MESH | {"microbatches": 2} | options
    loss, grads = jit(gradaccum.unreduced_value_and_grad(loss_fn, **options))(params, batch)
    assert {str(x.sum.dtype) for x in leaves_of(grads)} == {rows}
    assert (loss.sum.dtype, loss.weight.dtype) == (np.float32, np.float32)
    reduced = [
        v.aval
        for e in helpers.equations(jax.make_jaxpr(gradaccum.mean)((loss, grads)))
        if e.primitive.name.startswith("psum")
        for v in e.invars
    ]
    shapes = {x.shape for x in jax.tree.leaves(params)}
    assert {str(x.dtype) for x in reduced if x.shape in shapes} == {wire}
    assert {str(x.dtype) for x in reduced if x.shape not in shapes} == {"float32"}
    got = gradaccum.mean((loss, grads))
    assert {str(x.dtype) for x in jax.tree.leaves(got[1])} == {mean}
    if dtype == np.complex64:
        want = jax.device_get(jax.value_and_grad(loss_fn)(params, batch))
    else:
        want = layouts.in_float64(jax.value_and_grad(loss_fn), params, batch)
    within = helpers.TOLERANCE["bfloat16" if "bfloat16" in name else mean]
    assert_close(got, want, within=within)


def test_float16_on_the_wire_holds_the_sum_over_a_large_batch():
    """8,192 examples with a gradient of 100 each: their sum is no float16, their mean is."""
    options = {"reduce_dtype": np.float16, **ON_MESH}
    fun = gradaccum.unreduced_value_and_grad(lambda w, x: jnp.mean(100 * w * x), **options)
    loss, grad = gradaccum.mean(jit(fun)(1.0, np.ones(8192, np.float32)))
    assert_close((loss, grad), (np.float64(100), np.float64(100)), within=1e-3)
