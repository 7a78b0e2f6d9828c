"""`all_gather_to` and `reduce_scatter_from`: each has the values and gradients of two operators."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradaccum import audit
from gradaccum.tensor_parallel import (
    all_gather_to,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_from,
    scatter_to,
)

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)

modes = pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])


def mesh_of(*sizes, names=("mp",)):
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def sharded(fun, in_specs, out_specs, m=2, typed=False):
    options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": typed}
    return jax.shard_map(fun, mesh=mesh_of(m) if isinstance(m, int) else m, **options)


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


# --- Collectives ---------------------------------------------------------------------------------

SMALL = np.zeros((2, 4, 4), np.float32)
PART = SMALL[:1]
ON_SEQUENCE = P(None, "mp")


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


def test_a_dimension_that_m_does_not_divide():
    assert error_of(lambda x: reduce_scatter_from(x, "mp", 0), np.ones((6, 3))) == (
        "reduce_scatter_from: got x with shape (6, 3); axis 0 (6) is not divisible by the 4 "
        "devices along axis_name='mp'. Pad it to 8 and mask what was added, or take a number of "
        "devices that divides 6."
    )
