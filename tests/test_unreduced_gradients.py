"""`unreduced_value_and_grad`: its values, options and dtypes, against one full batch."""

import contextlib
import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.microbatching import AccumulationType as Kind

import gradaccum
from gradaccum import Unreduced, audit

jit = layouts.jit
N = 8
MESH = helpers.data_mesh(N)
ON_MESH = {"axis_name": "dp", "mesh": MESH}


def options_of(reduction):
    return {
        "mean": {},
        "sum": {"loss_reduction": "sum"},
        "tokens": {"weight_fn": helpers.count_tokens},
    }[reduction]


def unreduced(model="dense", reduction="mean", **options):
    loss_fn = helpers.loss_of(model, reduction)
    options = ON_MESH | options_of(reduction) | options
    return gradaccum.unreduced_value_and_grad(loss_fn, **options)


def make(model="dense", reduction="mean", dtype=np.float32):
    """Returns parameters, a batch, and the full batch's loss and gradients in float64."""
    params, batch = helpers.init(model, dtype), helpers.make_batch()
    return params, batch, helpers.reference(model, reduction, params, batch)


def is_rows(x):
    return isinstance(x, Unreduced)


def leaves_of(tree):
    return jax.tree.leaves(tree, is_leaf=is_rows)


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


# --- Decorated losses, and what is refused --------------------------------------------------------


def test_a_decorated_loss_keeps_its_options():
    params, batch, want = make(reduction="tokens")
    decorated = helpers.accumulated("dense", "tokens", microbatches=2, **ON_MESH)
    fun = gradaccum.unreduced_value_and_grad(decorated)
    loss, grads = jit(fun)(params, batch)
    np.testing.assert_array_equal(loss.weight, batch["mask"].reshape(N, -1).sum(1))
    assert_close(gradaccum.mean((loss, grads)), want)
    assert fun.__name__ == decorated.__name__
    with pytest.raises(
        TypeError, match=r"microbatches, axis_name given beside a loss that gradacc"
    ):
        gradaccum.unreduced_value_and_grad(decorated, microbatches=2, axis_name="dp")


class Model:
    @functools.partial(gradaccum.accumulate, microbatches=2, batch_argnums=2, **ON_MESH)
    def loss(self, params, batch):
        return jnp.mean(helpers.dense(params, batch))

    def plain(self, params, batch):
        return jnp.mean(helpers.dense(params, batch))


@pytest.mark.parametrize("where", ["argument", "context"])
@pytest.mark.parametrize("method", ["decorated", "plain"])
def test_a_method_of_an_instance(method, where):
    params, batch, want = make()
    if method == "decorated":
        fun = gradaccum.unreduced_value_and_grad(Model().loss)
    else:
        fun = gradaccum.unreduced_value_and_grad(Model().plain, **ON_MESH)
    with jax.set_mesh(MESH) if where == "context" else contextlib.nullcontext():
        assert not audit.collectives(jax.jit(fun), params, batch, mesh=MESH)
        assert_close(gradaccum.mean(fun(params, batch)), want)


REFUSED = {
    "a batch argument": (
        {"argnums": 1},
        ValueError,
        r"unreduced_value_and_grad: argnums asks for the gradient of batch\['ids'\], .*"
        r"batch\['y'\], which batch_argnums splits: it belongs to one device, and has no mean",
    ),
    "one among them": (
        {"argnums": (0, -1)},
        ValueError,
        r"the gradient of batch\['x'\], batch\['y'\], which batch_argnums splits",
    ),
    "no such argument": ({"argnums": 2}, TypeError, r"argnums=2\) of a call with 2 positional"),
    "rows": (
        {"microbatches": 3},
        ValueError,
        r"\(64, 3\); axis 0 \(64\) is not divisible by microbatches \* data devices = 3 \* 8 = 24",
    ),
    "no such option": ({"microbatch": 2}, TypeError, r"unexpected keyword argument 'microbatch'"),
    "axis": (
        {"axis_name": "q"},
        ValueError,
        r"axis_name has 'q', but the mesh's axes are \(dp=8\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    options, error, message = REFUSED[name]
    params, batch, _ = make()
    if name in ("a batch argument", "one among them"):
        batch = {n: batch[n] for n in "xy"} if name == "one among them" else batch
        batch = {n: x.astype(np.float32) for n, x in batch.items()}
    with pytest.raises(error, match=message):
        unreduced(**options)(params, batch)


def test_a_loss_that_is_no_function_is_refused_at_once():
    with pytest.raises(TypeError):
        gradaccum.unreduced_value_and_grad(None, **ON_MESH)


def test_eager_calls_share_one_trace():
    params, batch, _ = make()
    params = jax.device_put(params, NamedSharding(MESH, P()))  # as the results lie
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return jnp.mean(helpers.dense(params, batch))

    for _ in range(2):
        fun = gradaccum.unreduced_value_and_grad(loss_fn, microbatches=2, **ON_MESH)
        for _ in range(3):
            params = jax.tree.map(lambda p, g: p - g, params, gradaccum.mean(fun(params, batch)[1]))
    assert len(traces) == 1


def test_a_jitted_step_is_traced_once():
    """Fed with its own rows: what is static of them does not change."""
    params, batch, want = make()
    traces = []
    fun = unreduced()

    @jit
    def step(total, params, batch):
        traces.append(1)
        return gradaccum.add(total, fun(params, batch))

    total = jax.tree.map(jnp.zeros_like, jit(fun)(params, batch))
    for _ in range(3):
        total = step(total, params, batch)
    assert len(traces) == 1
    assert_close(gradaccum.mean(total), want)
