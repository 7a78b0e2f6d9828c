"""Activations sharded along the sequence: two operators, and the layers' `sequence_axis`."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import audit
from gradaccum.tensor_parallel import (
    all_gather_to,
    column_dense,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_from,
    row_dense,
    scatter_to,
)

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)

modes = pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])
sizes = pytest.mark.parametrize("m", [1, 2, 4])


def mesh_of(*sizes, names=("mp",)):
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def sharded(fun, in_specs, out_specs, m=2, typed=False):
    options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": typed}
    return jax.shard_map(fun, mesh=mesh_of(m) if isinstance(m, int) else m, **options)


def cast(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), tree)


def in_float64(fun, *args):
    """Returns fun of these very values, computed in float64."""
    with jax.enable_x64(True):
        return jax.device_get(jit(fun)(*jax.tree.map(lambda x: np.asarray(x, np.float64), args)))


# --- The operators -------------------------------------------------------------------------------

Y, W = helpers.normal(0, 4, 8, 4), 1 + np.abs(helpers.normal(1, 4))
GATHER = {
    "all_gather_to": all_gather_to,
    "copy_to(gather_from)": lambda x, *where: copy_to(gather_from(x, *where), where[0]),
}
SCATTER = {
    "reduce_scatter_from": reduce_scatter_from,
    "scatter_to(reduce_from)": lambda x, *where: scatter_to(reduce_from(x, where[0]), *where),
}


def through(y, w, gather, scatter, axes, axis):
    """What is gathered is used by each device in its own way; the parts of a sum are scattered."""
    whole = gather(y, axes, axis)
    parts = scatter(jnp.sin(whole * w[0]), axes, axis)
    return reduce_from(jnp.sum(parts**2 * y), axes)


def unsharded(y, w):
    return jnp.sum(jnp.sin(y[None] * w[:, None, None, None]).sum(0) ** 2 * y)


@pytest.mark.parametrize("gather", GATHER)
@pytest.mark.parametrize("scatter", SCATTER)
@modes
def test_one_collective_has_the_values_and_gradients_of_two_operators(typed, gather, scatter):
    fun = functools.partial(through, gather=GATHER[gather], scatter=SCATTER[scatter])
    fun = jax.value_and_grad(functools.partial(fun, axes="mp", axis=1), argnums=(0, 1))
    specs = (P(None, "mp"), P("mp"))
    with jax.enable_x64(True):
        got = jit(sharded(fun, specs, (P(), specs), 4, typed))(Y, W)
    want = in_float64(jax.value_and_grad(unsharded, argnums=(0, 1)), Y, W)
    helpers.assert_close(got, want, "float64")


@pytest.mark.parametrize(
    ("m", "axes", "axis"),
    [
        *((m, "mp", axis) for m, axis in ((1, 0), (2, -2), (4, 0), (4, -1))),
        *((4, axes, 1) for axes in (("a", "b"), ("b", "a"))),
    ],
    ids=str,
)
@modes
def test_dimensions_and_axes(typed, m, axes, axis):
    mesh = mesh_of(m) if axes == "mp" else mesh_of(2, 2, names=("a", "b"))
    operators = {"gather": all_gather_to, "scatter": reduce_scatter_from}
    fun = functools.partial(through, **operators, axes=axes, axis=axis)
    specs = (P(*(None,) * (axis % 3), axes), P(axes))
    fun = sharded(jax.value_and_grad(fun, argnums=(0, 1)), specs, (P(), specs), mesh, typed)
    want = in_float64(jax.value_and_grad(unsharded, argnums=(0, 1)), Y, W[:m])
    with jax.enable_x64(True):
        helpers.assert_close(jit(fun)(Y, W[:m]), want, "float64")


@modes
def test_second_derivatives_vmap_scan_and_remat(typed):
    """The gradient of a squared gradient, through recomputed layers of one example at a time."""

    def loss(y, w, gather, scatter):
        @jax.checkpoint
        def layer(h, w):
            one = lambda h: h + scatter(jnp.sin(gather(h) * w[0]))  # noqa: E731
            return jax.vmap(one)(h), None

        return jax.lax.scan(layer, y, w)[0]

    def parallel(y, w):
        gather = lambda h: all_gather_to(h, "mp", 0)  # noqa: E731
        scatter = lambda h: reduce_scatter_from(h, "mp", 0)  # noqa: E731
        total = lambda y: reduce_from(jnp.sum(loss(y, w, gather, scatter) ** 2), "mp")  # noqa: E731
        return reduce_from(jnp.sum(jax.grad(total)(y) ** 2), "mp")

    def alone(y, w):
        def layers(y):
            for i in range(w.shape[1]):
                y += jnp.sin(y[None] * w[:, i, None, None, None]).sum(0)
            return jnp.sum(y**2)

        return jnp.sum(jax.grad(layers)(y) ** 2)

    y, w = Y[:2] / 4, W[:, None] * np.ones(2)  # of each device, for each layer
    specs = (P(None, "mp"), P("mp"))
    fun = lambda y, w: jax.value_and_grad(parallel)(y, w.T)  # noqa: E731
    with jax.enable_x64(True):
        got = jit(sharded(fun, specs, (P(), specs[0]), 4, typed))(y, w)
    helpers.assert_close(got, in_float64(jax.value_and_grad(alone), y, w), "float64")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "int8", "uint32"])
@modes
def test_dtypes(typed, dtype):
    def fun(y):
        whole = all_gather_to(y, "mp", 0)
        return whole, reduce_scatter_from(whole * whole, "mp", 0)

    y = np.arange(1, 7).astype(dtype)
    whole, parts = jit(sharded(fun, P("mp"), (P("mp"), P("mp")), 2, typed))(y)
    assert whole.dtype == parts.dtype == dtype
    np.testing.assert_array_equal(whole, np.concatenate([y, y]))
    np.testing.assert_array_equal(parts, 2 * y * y)
    if jnp.issubdtype(dtype, jnp.inexact):
        loss = lambda y: reduce_from(jnp.sum(jnp.abs(fun(y)[1]) ** 2), "mp")  # noqa: E731
        grad = jit(sharded(jax.grad(loss), P("mp"), P("mp"), 2, typed))(y)
        want = jax.grad(lambda y: jnp.sum(jnp.abs(2 * y * y) ** 2))(y)
        assert grad.dtype == dtype
        helpers.assert_close(grad, want)


# --- A network between whose layers the sequence is sharded ---------------------------------------

T, D, F = 4, 4, 8
SHAPES = {"scale": (D,), "up": (D, F), "a": (F,), "down": (F, D), "b": (D,)}
SPECS = {"scale": P(), "up": P(None, "mp"), "a": P("mp"), "down": P("mp"), "b": P()}
PARAMS = {name: helpers.normal(i, *shape) / 2 for i, (name, shape) in enumerate(SHAPES.items())}
X = helpers.normal(9, 2, T, D)
ON_SEQUENCE = P(None, "mp")

SEQUENCE = {
    "f": lambda x: copy_to(x, "mp"),
    "g": lambda x: reduce_from(x, "mp"),
    "columns": lambda x, w, b: column_dense(x, w, b, "mp", sequence_axis=-2),
    "rows": lambda x, w, b: row_dense(x, w, b, "mp", sequence_axis=1),
}


def dense(x, w, b):
    return x @ w + b[None, None]


WHOLE = {"f": lambda x: x, "g": lambda x: x, "columns": dense, "rows": dense}


def network(p, x, f, g, columns, rows):
    """A replicated scale on sharded activations needs an f, as the row bias does."""
    h = x / (1 + jnp.abs(x).max(-1, keepdims=True)) * f(p["scale"])[None, None]
    h = x + jnp.sin(rows(jnp.tanh(columns(h, p["up"], p["a"])), p["down"], p["b"]))
    return g(jnp.sum(h**3)) / x.shape[0]


def both(layers, m=2, typed=False):
    fun = jax.value_and_grad(functools.partial(network, **layers), argnums=(0, 1))
    return jit(sharded(fun, (SPECS, ON_SEQUENCE), (P(), (SPECS, ON_SEQUENCE)), m, typed))


WANT = jax.value_and_grad(functools.partial(network, **WHOLE), argnums=(0, 1))


@sizes
@modes
def test_loss_and_gradients_are_the_unsharded_networks(typed, m):
    with jax.enable_x64(True):
        got = both(SEQUENCE, m, typed)(PARAMS, X)
    helpers.assert_close(got, in_float64(WANT, PARAMS, X), "float64")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@modes
def test_narrower_dtypes_are_kept(typed, dtype):
    args = cast((PARAMS, X), dtype)
    got = both(SEQUENCE, 2, typed)(*args)
    assert {str(x.dtype) for x in jax.tree.leaves(got)} == {dtype}
    helpers.assert_close(got, in_float64(WANT, *args))


CONTROLS = {  # a broken part, the leaves whose gradient is wrong
    "a scale without f": ({"f": lambda x: x}, {"scale"}),
    "a row bias without f": (
        {"rows": lambda x, w, b: reduce_scatter_from(x @ w, "mp", 1) + b[None, None]},
        {"b"},
    ),
    "gather_from before columns": (
        {"columns": lambda x, w, b: dense(gather_from(x, "mp", 1), w, b)},
        {"scale", "x"},
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_untyped_without_an_f_the_loss_is_right_and_gradients_are_parts(control):
    broken, wrong = CONTROLS[control]
    loss, (grads, grad_x) = both(SEQUENCE | broken)(*cast((PARAMS, X), "float32"))
    want_loss, (want, want_x) = in_float64(WANT, PARAMS, X)
    helpers.assert_close(loss, want_loss, "float32")
    grads, want = grads | {"x": grad_x}, want | {"x": want_x}
    right = [n for n in grads if np.abs(grads[n] - want[n]).max() < 1e-5 * np.abs(want[n]).max()]
    assert set(grads) - set(right) == wrong


# --- Inside accumulate ----------------------------------------------------------------------------

DP_MP = mesh_of(2, 2, names=("dp", "mp"))
BATCH = helpers.normal(10, 8, T, D).astype(np.float32)
P32 = cast(PARAMS, "float32")


def decorate(fun, typed=False, specs=None, batch_spec=None):
    in_specs = (SPECS if specs is None else specs, batch_spec or P("dp", "mp"))
    return gradaccum.accumulate(
        fun, microbatches=2, axis_name="dp", mesh=DP_MP, in_specs=in_specs, check_vma=typed
    )


@modes
def test_accumulated_gradients_are_those_of_the_whole_batch(typed):
    fun = jit(jax.value_and_grad(decorate(functools.partial(network, **SEQUENCE), typed)))
    want = in_float64(jax.value_and_grad(functools.partial(network, **WHOLE)), P32, BATCH)
    helpers.assert_close(fun(P32, BATCH), want, "float32")
    rows = audit.collectives(fun, P32, BATCH)
    assert [row.executions for row in rows if row.axes == ("dp",)] == [1]
    per_microbatch = [row.kind for row in rows if row.axes == ("mp",) and row.executions == 2]
    # Forward a gather and a scatter; of x no gradient, so backward a gather (of the rows), a
    # scatter (for the scale) and the sums of scale, bias; and the loss.
    assert sorted(per_microbatch).count("all-gather") == 2
    assert sorted(per_microbatch).count("reduce-scatter") == 2


@pytest.mark.parametrize("control", ["a scale without f", "a row bias without f"])
def test_a_replicated_parameter_on_a_sharded_sequence_without_copy_to_is_refused(control):
    broken, _ = CONTROLS[control]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is compared
        jax.grad(decorate(functools.partial(network, **SEQUENCE | broken)))(P32, BATCH)
    message = str(caught.value)
    assert message.startswith(
        "accumulate: a value that is the same on all devices of mp is used where each has a part "
        "of its own ("
    )
    assert "test_sequence_parallel.py:" in message
    assert "Pass it through gradaccum.tensor_parallel.copy_to(x, 'mp') there" in message


def raw(x, axis_name, axis):
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)


def gathered(p, x, gather):
    """A loss that every device computes of the whole result: it counts once."""
    y = gather(jnp.tanh(x @ p["up"] + p["a"][None, None]), "mp", 2)
    return jnp.sum(jnp.sin(y) ** 2 * jnp.arange(1.0, 1.0 + F, dtype=y.dtype)[None, None]) / len(x)


UP = {"specs": {n: SPECS[n] for n in ("up", "a")}, "batch_spec": P("dp")}
UP_PARAMS = {n: P32[n] for n in ("up", "a")}


@modes
def test_a_replicated_loss_after_a_gather_counts_once_in_accumulate(typed):
    want = functools.partial(gathered, gather=lambda y, *_: y)
    want = in_float64(jax.value_and_grad(want), UP_PARAMS, BATCH)
    loss = decorate(functools.partial(gathered, gather=gather_from), typed, **UP)
    helpers.assert_close(jit(jax.value_and_grad(loss))(UP_PARAMS, BATCH), want, "float32")


def test_a_replicated_loss_after_a_raw_gather_would_count_twice_and_is_refused():
    want = functools.partial(gathered, gather=lambda y, *_: y)
    want_loss, want = in_float64(jax.value_and_grad(want), UP_PARAMS, BATCH)
    doubled = {n: 2 * g for n, g in want.items()}
    for gather in (raw, all_gather_to):
        fun = jax.value_and_grad(functools.partial(gathered, gather=gather))
        fun = sharded(fun, (UP["specs"], P()), (P(), UP["specs"]))
        helpers.assert_close(jit(fun)(UP_PARAMS, BATCH), (want_loss, doubled), "float32")
    loss = decorate(functools.partial(gathered, gather=raw), **UP)
    with pytest.raises(ValueError, match=r"^accumulate: .*raw collective.*all_gather over mp at"):
        jax.grad(loss)(UP_PARAMS, BATCH)
    # Types say that what was gathered for sharded computation varies, and so the loss.
    loss = decorate(functools.partial(gathered, gather=all_gather_to), True, **UP)
    with pytest.raises(ValueError, match=r"^accumulate: .*varies over it"):
        jax.grad(loss)(UP_PARAMS, BATCH)


# --- Collectives ---------------------------------------------------------------------------------

SMALL, LARGE = np.zeros((2, T, D), np.float32), np.zeros((2, T, F), np.float32)
PART = SMALL[:1]


def row(kind, size):
    return kind, ("mp",), size


GATHERS, SCATTERS = row("all-gather", SMALL.nbytes), row("reduce-scatter", SMALL.nbytes)
COSTS = {  # a function, its arguments, specs and results; collectives forward, and backward
    "all_gather_to": (
        lambda x: all_gather_to(x, "mp", 1),
        *((SMALL,), (ON_SEQUENCE,), P("mp")),
        *([GATHERS], [SCATTERS]),
    ),
    "reduce_scatter_from": (
        lambda x: reduce_scatter_from(x, "mp", 1),
        *((SMALL,), (P("mp"),), ON_SEQUENCE),
        *(
            [("reduce-scatter", ("mp",), SMALL.nbytes // 2)],
            [("all-gather", ("mp",), SMALL.nbytes // 2)],
        ),
    ),
    "column_dense": (
        SEQUENCE["columns"],
        *((SMALL, P32["up"], P32["a"]), (ON_SEQUENCE, P(None, "mp"), P("mp"))),
        *(P(None, None, "mp"), [GATHERS], [SCATTERS]),
    ),
    "row_dense": (
        SEQUENCE["rows"],
        *((LARGE, P32["down"], P32["b"]), (P(None, None, "mp"), P("mp"), P()), ON_SEQUENCE),
        *([SCATTERS], [GATHERS, row("all-reduce", P32["b"].nbytes)]),
    ),
}


@pytest.mark.parametrize("m", [1, 2])
@modes
@pytest.mark.parametrize("name", COSTS)
def test_collectives_are_those_of_the_docstring(name, typed, m):
    fun, args, specs, out, forward, backward = COSTS[name]

    def with_gradients(*args):
        y, transpose = jax.vjp(fun, *args)
        return y, transpose(jnp.cos(y))

    mesh = mesh_of(m, 2, names=("mp", "dp"))
    for call, results, kinds in (
        (fun, out, forward),
        (with_gradients, (out, specs), forward + backward),
    ):
        rows = audit.collectives(jit(sharded(call, specs, results, mesh, typed)), *args)
        found = sorted((row.kind, row.axes, row.bytes) for row in rows)
        assert found == (sorted(kinds) if m > 1 else []), rows


# --- Errors --------------------------------------------------------------------------------------


def error_of(fun, *args):
    mesh = mesh_of(2, 4, names=("dp", "mp"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller matches the text
        jit(sharded(fun, P(), P(), mesh))(*args)
    return str(caught.value)


@pytest.mark.parametrize("operator", [all_gather_to, reduce_scatter_from], ids=lambda f: f.__name__)
def test_operands_that_cannot_be_right(operator):
    api, x = operator.__name__, np.ones((2, 6))
    assert error_of(lambda x: operator(x, "tp"), x) == (
        f"{api}: got axis_name='tp', needed a manual axis of the mesh or a tuple of different "
        "ones; manual here: dp=2, mp=4. Call it inside a jax.shard_map over that axis (in its "
        "axis_names, if they are given)."
    )
    for axis in (2, -3):
        assert error_of(lambda x, axis=axis: operator(x, "mp", axis), x) == (
            f"{api}: got axis={axis} for x with shape (2, 6), needed -2 <= axis < 2. Give the "
            "dimension that is split over the devices."
        )
    assert "for x with shape (), needed a rank of at least 1." in error_of(
        lambda x: operator(x[0, 0], "mp"), x
    )


def test_a_sequence_that_m_does_not_divide():
    axis = "axis 0 (6) is not divisible by the 4 devices along axis_name='mp'. Pad it to 8 and mask"
    axis += " what was added, or take a number of devices that divides 6."
    x, w = np.ones((6, 3)), np.ones((3, 5))
    message = error_of(lambda x: reduce_scatter_from(x, "mp", 0), x)
    assert message == f"reduce_scatter_from: got x with shape (6, 3); {axis}"
    message = error_of(lambda x, w: row_dense(x, w, None, "mp", sequence_axis=0), x, w)
    assert message == f"row_dense: got x with shape (6, 3); {axis}"


@pytest.mark.parametrize("layer", [column_dense, row_dense], ids=lambda f: f.__name__)
def test_a_sequence_axis_that_x_does_not_have(layer):
    def message(axis):
        fun = lambda x, w: layer(x, w, None, "mp", sequence_axis=axis)  # noqa: E731
        return error_of(fun, np.ones((4, 6)), np.ones((6, 8)))

    api = layer.__name__
    for axis in (-1, 1):
        assert message(axis) == (
            f"{api}: got sequence_axis={axis} for x with shape (4, 6); the last dimension holds "
            "the features. Give the dimension of the sequence."
        )
    for axis in (2, -3):
        assert message(axis) == (
            f"{api}: got sequence_axis={axis} for x with shape (4, 6), needed -2 <= sequence_axis "
            "< 2. Give the dimension that is split over the devices."
        )
