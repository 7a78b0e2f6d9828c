"""`embedding`, `column_dense` and `row_dense`: a sharded network equals the unsharded one."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradaccum import audit
from gradaccum.tensor_parallel import column_dense, copy_to, embedding, reduce_from, row_dense

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)

modes = pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])
sizes = pytest.mark.parametrize("m", [1, 2, 4])
LAYERS = (embedding, column_dense, row_dense)


def mesh_of(*sizes, names=("mp",)):
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def sharded(fun, in_specs, out_specs, m=2, typed=False, **options):
    options |= {"in_specs": in_specs, "out_specs": out_specs, "check_vma": typed}
    return jax.shard_map(fun, mesh=mesh_of(m) if isinstance(m, int) else m, **options)


# --- A network: an embedding, a norm's scale, columns and rows with biases, a residual -----------

V, D, F = 12, 4, 8
SPECS = {"table": P("mp"), "scale": P(), "up": P(None, "mp"), "a": P("mp"), "down": P("mp")}
SPECS |= {"b": P()}
SHAPES = {"table": (V, D), "scale": (D,), "up": (D, F), "a": (F,), "down": (F, D), "b": (D,)}
PARAMS = {name: helpers.normal(i, *shape) / 2 for i, (name, shape) in enumerate(SHAPES.items())}
IDS = np.array([[0, 5, 11], [3, -1, 7]])  # one is padding

SHARDED = {
    "look_up": lambda table, ids: embedding(table, ids, "mp"),
    "columns": lambda x, w, b: column_dense(x, w, b, "mp"),
    "rows": lambda x, w, b: row_dense(x, w, b, "mp"),
}


def dense(x, w, b):
    return x @ w + b[None, None]


WHOLE = {
    "look_up": lambda table, ids: jnp.where((ids >= 0)[..., None], table[ids], 0),
    "columns": dense,
    "rows": dense,
}


def network(p, ids, look_up, columns, rows):
    h = look_up(p["table"], ids)
    normed = h / (1 + jnp.abs(h).max(-1, keepdims=True)) * p["scale"][None, None]
    h += jnp.sin(rows(jnp.tanh(columns(normed, p["up"], p["a"])), p["down"], p["b"]))
    return jnp.sum(h * jnp.sin(jnp.arange(h.size, dtype=h.dtype)).reshape(h.shape))


whole, in_parallel = (functools.partial(network, **layers) for layers in (WHOLE, SHARDED))


def cast(tree, dtype):
    return jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(dtype)), tree)


def widest(x):
    return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None)


def in_float64(fun, *args):
    """Returns fun of these very values, computed in float64."""
    with jax.enable_x64(True):
        return jax.device_get(jit(fun)(*jax.tree.map(widest, args)))


def run(fun, m, typed, dtype="float32"):
    """Returns loss and gradients of the sharded network."""
    fun = sharded(jax.value_and_grad(fun), (SPECS, P()), (P(), SPECS), m, typed)
    return jit(fun)(cast(PARAMS, dtype), IDS)


@sizes
@modes
def test_float64_loss_and_gradients_are_the_unsharded_networks(typed, m):
    with jax.enable_x64(True):
        got = run(in_parallel, m, typed, "float64")
    helpers.assert_close(got, in_float64(jax.value_and_grad(whole), PARAMS, IDS), "float64")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@modes
def test_narrower_dtypes_are_kept(typed, dtype):
    loss, grads = run(in_parallel, 2, typed, dtype)
    assert {str(x.dtype) for x in jax.tree.leaves((loss, grads))} == {dtype}
    want = in_float64(jax.value_and_grad(whole), cast(PARAMS, dtype), IDS)
    # Unsharded in bfloat16 it is off by 0.015.
    helpers.assert_close((loss, grads), want, within=0.04 if dtype == "bfloat16" else None)


def test_a_wider_bias_or_weight_decides_the_dtype():
    """As in x @ w + b: bfloat16 activations with float32 weights are summed in float32."""

    def fun(x, w, b):
        y = column_dense(x, w.T, None, "mp"), row_dense(x[..., :2], w, None, "mp")
        return *y, row_dense(x[..., :2], w.astype("bfloat16"), b, "mp")

    types = jit(sharded(fun, (P(), P("mp"), P()), (P(None, "mp"), P(), P()))).eval_shape(
        *(jax.ShapeDtypeStruct(s, t) for s, t in (((3, 4), "bfloat16"), ((4, 4), "float32"))),
        jax.ShapeDtypeStruct((4,), "float32"),
    )
    assert [(t.shape, str(t.dtype)) for t in types] == [((3, 4), "float32")] * 3


def test_several_axes_order_shards_as_a_partition_spec_does():
    axes = ("b", "a")
    layers = {
        "look_up": lambda table, ids: embedding(table, ids, axes),
        "columns": lambda x, w, b: column_dense(x, w, b, axes),
        "rows": lambda x, w, b: row_dense(x, w, b, axes),
    }
    specs = {n: P(*(axes if a == "mp" else a for a in spec)) for n, spec in SPECS.items()}
    fun = jax.value_and_grad(functools.partial(network, **layers))
    fun = sharded(fun, (specs, P()), (P(), specs), mesh_of(2, 2, names=("a", "b")))
    got = jit(fun)(cast(PARAMS, "float32"), IDS)
    helpers.assert_close(got, in_float64(jax.value_and_grad(whole), PARAMS, IDS), "float32")


# --- What goes wrong without each part: the controls of the tests above --------------------------

CONTROLS = {  # a broken layer, the leaves whose gradient is wrong, and by what factor (None: other)
    "psum instead of g (T1)": (
        {"rows": lambda x, w, b: jax.lax.psum(x @ w, "mp") + b[None, None]},
        {"scale": 2, "up": 2, "a": 2, "down": 2},
        {"table"},
    ),
    "no f (T5)": ({"columns": dense}, {}, {"table", "scale"}),
    "one f too many": (
        {"columns": lambda x, w, b: column_dense(copy_to(x, "mp"), w, b, "mp")},
        {"scale": 2},
        {"table"},
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_t1_t5_untyped_without_an_operator_the_loss_is_right_and_gradients_are_not(control):
    broken, factors, others = CONTROLS[control]
    fun = functools.partial(network, **SHARDED | broken)
    loss, grads = run(fun, 2, False)
    want_loss, want = in_float64(jax.value_and_grad(whole), PARAMS, IDS)
    helpers.assert_close(loss, want_loss, "float32")
    expected = {n: want[n] * factors.get(n, 1) for n in want if n not in others}
    helpers.assert_close({n: grads[n] for n in expected}, expected, "float32")
    for n in others:
        assert np.abs(grads[n] - want[n]).max() > 0.02 * np.abs(want[n]).max(), n


def textbook(forward, backward):
    fun = jax.custom_vjp(forward)
    fun.defvjp(lambda x: (forward(x), None), lambda _, ct: (backward(ct),))
    return fun


def same(x):
    return x


def psum(x):
    return jax.lax.psum(x, "mp")


def test_t3_typed_a_textbook_f_doubles_what_is_upstream_silently():
    """T3: its rule sums what the type system has summed already."""
    f = textbook(same, psum)
    columns = {"columns": lambda x, w, b: dense(f(x), w, b)}
    loss, grads = run(functools.partial(network, **SHARDED | columns), 2, True)
    want_loss, want = in_float64(jax.value_and_grad(whole), PARAMS, IDS)
    helpers.assert_close(loss, want_loss, "float32")
    helpers.assert_close(grads["scale"], 2 * want["scale"], "float32")
    helpers.assert_close(grads["up"], want["up"], "float32")


def test_t4_typed_a_textbook_g_is_a_type_error():
    """T4: the cotangent of what varies has to vary."""
    g = textbook(psum, same)
    rows = {"rows": lambda x, w, b: g(x @ w) + b[None, None]}
    with pytest.raises((TypeError, ValueError), match=r"(?s)varying|manual"):
        run(functools.partial(network, **SHARDED | rows), 2, True)


# The right loss is 7.34: a product of 6.12, and a bias that adds 1.22.
ROW_ARGS = np.float32([[1, 2]]), np.float32([[1.12, 1], [1, 1]]), np.float32([0.5, 0.72])
ROW_LAYERS = {
    "row_dense": (lambda x, w, b: row_dense(x, w, b, "mp"), 7.34, [1, 1]),
    "bias before the sum (T9)": (lambda x, w, b: reduce_from(x @ w + b[None], "mp"), 8.56, [1, 1]),
    "a part of the bias (T10)": (
        lambda x, w, b: reduce_from(x @ w + b[None] / 2, "mp"),
        7.34,
        [0.5, 0.5],
    ),
}


@pytest.mark.parametrize("name", ROW_LAYERS)
def test_t9_t10_the_row_bias_counts_once_in_the_loss_and_in_its_gradient(name):
    layer, want_loss, want_grad = ROW_LAYERS[name]
    fun = jax.value_and_grad(lambda x, w, b: layer(x, w, b).sum(), argnums=2)
    loss, grad = jit(sharded(fun, (P(None, "mp"), P("mp"), P()), P()))(*ROW_ARGS)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-6)


# --- Inside transformations ----------------------------------------------------------------------


def deep(p, ids, look_up, columns, rows):
    """Recomputed layers in a scan, and each example by vmap."""

    @jax.checkpoint
    def layer(h, w):
        def one(h):
            return h + rows(jnp.tanh(columns(h, w["up"], w["a"])), w["down"], w["b"])

        return jax.vmap(one)(h), None

    h = jax.vmap(lambda ids: look_up(p["table"], ids))(ids)
    h, _ = jax.lax.scan(layer, h, p["layers"])
    return jnp.sum(jnp.sin(h) * jnp.arange(1.0, 1.0 + h.size, dtype=h.dtype).reshape(h.shape))


LAYERS_OF = ("up", "a", "down", "b")
DEEP = {"table": PARAMS["table"]}
DEEP["layers"] = {n: helpers.normal(9 + i, 2, *SHAPES[n]) / 2 for i, n in enumerate(LAYERS_OF)}
DEEP_SPECS = {"table": P("mp"), "layers": {n: P(None, *SPECS[n]) for n in LAYERS_OF}}


def plain(x, w, b):
    return x @ w + jnp.broadcast_to(b, (*x.shape[:-1], *b.shape))


@modes
def test_scan_remat_vmap_and_jit(typed):
    parallel = {name: jax.jit(layer) for name, layer in SHARDED.items()}
    fun = jax.value_and_grad(functools.partial(deep, **parallel))
    fun = sharded(fun, (DEEP_SPECS, P()), (P(), DEEP_SPECS), 2, typed)
    got = jit(fun)(cast(DEEP, "float32"), IDS)
    want = functools.partial(deep, **WHOLE | {"columns": plain, "rows": plain})
    helpers.assert_close(got, in_float64(jax.value_and_grad(want), DEEP, IDS), "float32")


@modes
def test_experts_by_vmap_over_the_weights(typed):
    def experts(p, x, columns, rows):
        one = lambda p, x: rows(jnp.tanh(columns(x, p["up"], p["a"])), p["down"], p["b"])  # noqa: E731
        return jnp.sum(jnp.sin(jax.vmap(one)(p, x)))

    specs, x = DEEP_SPECS["layers"], helpers.normal(20, 2, 3, D)
    parallel = functools.partial(experts, columns=SHARDED["columns"], rows=SHARDED["rows"])
    fun = jax.value_and_grad(parallel, argnums=(0, 1))
    fun = sharded(fun, (specs, P()), (P(), (specs, P())), 2, typed)
    got = jit(fun)(*cast((DEEP["layers"], x), "float32"))
    want = jax.value_and_grad(functools.partial(experts, columns=plain, rows=plain), argnums=(0, 1))
    helpers.assert_close(got, in_float64(want, DEEP["layers"], x), "float32")


# --- Collectives ---------------------------------------------------------------------------------

X, H = np.zeros((2, 3, D), np.float32), np.zeros((2, 3, F), np.float32)
REDUCE = ("all-reduce", ("mp",), X.nbytes)
P32 = cast(PARAMS, "float32")
COSTS = {  # arguments, specs and results; collectives forward, and backward
    embedding: ((P32["table"], IDS), (P("mp"), P()), P(), [REDUCE], []),
    column_dense: (
        (X, P32["up"], P32["a"]),
        (P(), P(None, "mp"), P("mp")),
        P(None, None, "mp"),
        *([], [REDUCE]),
    ),
    row_dense: (
        (H, P32["down"], P32["b"]),
        (P(None, None, "mp"), P("mp"), P()),
        P(),
        *([REDUCE], []),
    ),
}


@pytest.mark.parametrize("m", [1, 4])
@modes
@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_collectives_are_those_of_the_docstring(layer, typed, m):
    args, specs, out, forward, backward = COSTS[layer]
    wanted = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))

    def call(*args):
        return layer(*args, axis_name="mp")

    def both(*args):
        def of(*some):
            return call(*(some[wanted.index(i)] if i in wanted else a for i, a in enumerate(args)))

        y, transpose = jax.vjp(of, *(args[i] for i in wanted))
        return y, transpose(jnp.cos(y))

    grads = tuple(specs[i] for i in wanted)
    mesh = mesh_of(m, 2, names=("mp", "dp"))
    for fun, results, kinds in ((call, out, forward), (both, (out, grads), forward + backward)):
        rows = audit.collectives(jit(sharded(fun, specs, results, mesh, typed)), *args)
        assert [(row.kind, row.axes, row.bytes) for row in rows] == (kinds if m > 1 else []), rows


@modes
def test_a_checkpoint_policy_saves_the_sums_by_their_name(typed):
    """Two sums in a recomputed layer, the first of which the second's backward pass needs."""
    names = jax.checkpoint_policies.save_only_these_names("gradaccum/tensor_parallel")

    def loss(p, x, policy, recompute=True):
        def layer(h, w):
            for rows in (w, jax.tree.map(jnp.sin, w)):
                h += jnp.sin(plain_block(h, rows))
            return h, None

        layer = jax.checkpoint(layer, policy=policy) if recompute else layer
        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, p)[0]))

    def plain_block(h, w):
        up = jnp.tanh(column_dense(h, w["up"], w["a"], "mp"))
        return row_dense(up, w["down"], w["b"], "mp")

    specs, args = DEEP_SPECS["layers"], cast((DEEP["layers"], X + 1), "float32")
    counts, results = [], []
    for options in ({"recompute": False}, {}, {"policy": names}):
        fun = functools.partial(loss, **{"policy": None} | options)
        fun = jit(sharded(jax.value_and_grad(fun), (specs, P()), (P(), specs), 2, typed))
        rows = audit.collectives(fun, *args)
        assert {row.kind for row in rows} == {"all-reduce"}
        counts.append(sum(row.executions for row in rows))
        results.append(fun(*args))
    layers = 2  # in the scan, each with two sums forward and two backward; the first again
    assert counts == [4 * layers, 6 * layers, 4 * layers]
    helpers.assert_close(results[1], results[0])
    helpers.assert_close(results[2], results[0])
