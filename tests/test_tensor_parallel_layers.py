"""`embedding`, `column_dense` and `row_dense`: a sharded network equals the unsharded one."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_network import (
    IDS,
    PARAMS,
    SHAPES,
    SHARDED,
    SPECS,
    WHOLE,
    D,
    F,
    in_parallel,
    network,
    run,
    whole,
)
from layouts import in_float64, jit
from model_axis import cast, mesh_of, modes, sharded, sizes

from gradaccum import audit
from gradaccum.tensor_parallel import column_dense, embedding, row_dense

LAYERS = (embedding, column_dense, row_dense)


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
