"""The Megatron operators: values, gradients and collectives against the unsharded computation."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layouts import in_float64, jit
from model_axis import mesh_of, modes, sizes
from over_mp import OVER_MP, Y, sharded, weigh

from gradaccum import audit
from gradaccum.tensor_parallel import copy_to, gather_from, reduce_from, scatter_to

OPERATORS = (copy_to, reduce_from, gather_from, scatter_to)

# --- A network: a replicated layer, columns then rows, a replicated layer again ------------------

SPECS = {"scale": P(), "up": P(None, "mp"), "down": P("mp"), "head": P()}
PARAMS = {
    "scale": helpers.normal(0, 3).astype(np.float32),
    "up": helpers.normal(1, 3, 4).astype(np.float32),
    "down": helpers.normal(2, 4, 3).astype(np.float32),
    "head": helpers.normal(3, 3).astype(np.float32),
}
X = helpers.normal(4, 2, 3).astype(np.float32)


def network(p, x, f=lambda x: x, g=lambda x: x):
    """The loss; f and g stand where sharded computation begins and ends."""
    h = f(jnp.tanh(x * p["scale"][None]))
    y = g(jnp.tanh(h @ p["up"]) @ p["down"])
    return jnp.sum(jnp.sin(y * p["head"][None]))


in_parallel = functools.partial(network, **OVER_MP)


@sizes
@modes
def test_t1_t3_t4_t5_the_gradient_is_the_unsharded_models(typed, m):
    fun = jax.value_and_grad(in_parallel)
    got = jit(sharded(fun, mesh_of(m), (SPECS, P()), (P(), SPECS), typed))(PARAMS, X)
    helpers.assert_close(got, in_float64(jax.value_and_grad(network), PARAMS, X), "float32")


def test_typed_the_gradient_from_outside_the_shard_map_is_right_too():
    fun = jax.value_and_grad(sharded(in_parallel, mesh_of(4), (SPECS, P()), P(), True))
    want = in_float64(jax.value_and_grad(network), PARAMS, X)
    helpers.assert_close(jit(fun)(PARAMS, X), want, "float32")


def test_untyped_from_outside_shard_map_divides_by_m_as_documented():
    fun = jax.grad(sharded(in_parallel, mesh_of(4), (SPECS, P()), P(), False))
    got, want = jit(fun)(PARAMS, X), in_float64(jax.grad(network), PARAMS, X)
    got = {name: g * 4 if name in ("up", "down") else g for name, g in got.items()}
    helpers.assert_close(got, want, "float32")


# What is too large (or not whole) without each operator: the controls of the test above.
CONTROLS = {
    "psum for reduce_from": (
        OVER_MP | {"g": lambda x: jax.lax.psum(x, "mp")},
        {"scale": 4, "up": 4, "down": 4, "head": 1},
    ),
    "no copy_to": (OVER_MP | {"f": lambda x: x}, {"up": 1, "down": 1, "head": 1}),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_t1_t5_without_an_operator_the_loss_is_right_and_gradients_are_not(control):
    operators, factors = CONTROLS[control]
    fun = jax.value_and_grad(functools.partial(network, **operators))
    loss, grads = jit(sharded(fun, mesh_of(4), (SPECS, P()), (P(), SPECS), False))(PARAMS, X)
    want_loss, want = in_float64(jax.value_and_grad(network), PARAMS, X)
    helpers.assert_close(loss, want_loss, "float32")
    scaled = {name: want[name] * factor for name, factor in factors.items()}
    helpers.assert_close({name: grads[name] for name in factors}, scaled, "float32")
    wrong = [n for n in PARAMS if np.abs(grads[n] - want[n]).max() > 0.1 * np.abs(want[n]).max()]
    assert wrong == [name for name in PARAMS if factors.get(name) != 1]


@modes
def test_a_data_axis_beside_the_model_axis(typed):
    """Manual in an outer shard_map, the model axis in an inner one: a tensor-parallel loss."""

    def on_data(p, x):
        inner = functools.partial(sharded, in_specs=(SPECS, P()), out_specs=(P(), SPECS))
        fun = inner(jax.value_and_grad(in_parallel), None, typed=typed, axis_names={"mp"})
        return jax.lax.psum(fun(jax.lax.pcast(p, "dp", to="varying"), x), "dp")

    mesh = mesh_of(2, 2, names=("dp", "mp"))
    fun = sharded(on_data, mesh, (P(), P("dp")), P(), typed, axis_names={"dp"})
    want = in_float64(jax.value_and_grad(network), PARAMS, X)
    helpers.assert_close(jit(fun)(PARAMS, X), want, "float32")


# --- Gather and scatter --------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@modes
def test_a_replicated_loss_after_a_gather_counts_once(typed, axis):
    spec = P(*(None,) * (axis % 3), "mp")
    fun = jax.value_and_grad(lambda y: weigh(gather_from(y, "mp", axis)))
    got = jit(sharded(fun, mesh_of(4), spec, (P(), spec), typed))(Y)
    helpers.assert_close(got, in_float64(jax.value_and_grad(weigh), Y), "float32")


@sizes
@modes
def test_scatter_then_gather_is_the_identity(typed, m):
    def fun(y):
        part = jnp.cos(scatter_to(jnp.tanh(y), "mp", 1))
        return weigh(gather_from(part, "mp", 1))

    got = jit(sharded(jax.value_and_grad(fun), mesh_of(m), P(), P(), typed))(Y)
    want = in_float64(jax.value_and_grad(lambda y: weigh(jnp.cos(jnp.tanh(y)))), Y)
    helpers.assert_close(got, want, "float32")


@sizes
@modes
def test_gather_then_scatter_is_the_identity(typed, m):
    def fun(y):
        return reduce_from(jnp.sum(scatter_to(gather_from(jnp.cos(y), "mp"), "mp") ** 2), "mp")

    spec = P(None, None, "mp")
    got = jit(sharded(jax.value_and_grad(fun), mesh_of(m), spec, (P(), spec), typed))(Y)
    want = in_float64(jax.value_and_grad(lambda y: jnp.sum(jnp.cos(y) ** 2)), Y)
    helpers.assert_close(got, want, "float32")


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("b",)], ids="-".join)
@modes
def test_several_axes_order_shards_as_a_partition_spec_does(typed, names):
    def fun(x, w, y):
        part = scatter_to(copy_and_sum(x, w), names, 0) * y
        return weigh(gather_from(part, names, 0))

    def copy_and_sum(x, w):
        return reduce_from(jnp.tanh(copy_to(x, names) * w).sum(1, keepdims=True), names)

    def unsharded(x, w, y):
        return weigh(jnp.tanh(x * w).sum(1, keepdims=True) * y)

    shapes = enumerate([(8, 1), (8, 4), (8, 1)])
    x, w, y = (helpers.normal(seed, *shape).astype(np.float32) for seed, shape in shapes)
    mesh, specs = mesh_of(2, 2, names=("a", "b")), (P(), P(None, names), P(names))
    fun = jax.value_and_grad(fun, argnums=(0, 1, 2))
    got = jit(sharded(fun, mesh, specs, (P(), specs), typed))(x, w, y)
    want = in_float64(jax.value_and_grad(unsharded, argnums=(0, 1, 2)), x, w, y)
    helpers.assert_close(got, want, "float32")


# --- Collectives ---------------------------------------------------------------------------------

KINDS = {
    copy_to: ([], ["all-reduce"]),
    reduce_from: (["all-reduce"], []),
    gather_from: (["all-gather"], []),
    scatter_to: ([], ["all-gather"]),
}


@sizes
@modes
@pytest.mark.parametrize("operator", KINDS, ids=lambda f: f.__name__)
def test_collectives_forward_and_backward(operator, typed, m):
    own = P(None, None, "mp")
    into = own if operator in (reduce_from, gather_from) else P()
    out = P() if operator in (reduce_from, gather_from) else own

    def backward(x, ct):
        return jax.vjp(lambda x: operator(x, "mp"), x)[1](ct)[0]

    ct = np.ones((4, 8, 4 * m if operator is copy_to else 4 // m if operator is reduce_from else 4))
    mesh = mesh_of(m, 2, names=("mp", "dp"))
    for fun, args, specs, kinds in (
        (lambda x: operator(x, "mp"), (Y,), ((into,), out), KINDS[operator][0]),
        (backward, (Y, ct.astype(np.float32)), ((into, out), into), KINDS[operator][1]),
    ):
        rows = audit.collectives(jit(sharded(fun, mesh, *specs, typed)), *args)
        expected = kinds if m > 1 else []
        assert [(row.kind, row.axes) for row in rows] == [(k, ("mp",)) for k in expected], rows


# --- Errors --------------------------------------------------------------------------------------


def message_of(fun, **options):
    mesh = mesh_of(2, 4, names=("dp", "mp"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller matches the text
        jit(sharded(fun, mesh, P(), P(), False, **options))(np.ones((2, 6)))
    return str(caught.value)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)
def test_an_axis_that_is_not_manual_here(operator):
    api = operator.__name__
    assert message_of(lambda x: operator(x, "tp")) == (
        f"{api}: got axis_name='tp', needed a manual axis of the mesh or a tuple of different "
        "ones; manual here: dp=2, mp=4. Call it inside a jax.shard_map over that axis (in its "
        "axis_names, if they are given)."
    )
    automatic = message_of(lambda x: operator(x, ("dp", "mp")), axis_names={"dp"})
    assert f"{api}: got axis_name=('dp', 'mp'), needed" in automatic
    assert "manual here: dp=2. Call" in automatic
    with pytest.raises(ValueError, match=f"{api}: got axis_name='mp'.*; no axis is manual here"):
        operator(np.ones(4), "mp")


@pytest.mark.parametrize("names", [(), ("mp", "mp"), None, 0], ids=str)
def test_no_axis_and_one_axis_twice(names):
    message = message_of(lambda x: copy_to(x, names))
    assert f"copy_to: got axis_name={names!r}, needed" in message


@pytest.mark.parametrize("tree", [{"a": Y}, [Y, Y]], ids=["dict", "list"])
def test_a_tree_is_refused(tree):
    """A list of arrays of one shape would be stacked."""
    with pytest.raises(TypeError, match=rf"copy_to: got a {type(tree).__name__}, needed one array"):
        jit(sharded(lambda: copy_to(tree, "mp"), mesh_of(2), (), P(), False))()


def test_a_dimension_that_is_no_int():
    with pytest.raises(TypeError, match=r"gather_from: got axis=0.0, needed an int"):
        jit(sharded(lambda x: gather_from(x, "mp", 0.0), mesh_of(2), P(), P(), False))(Y)


def test_a_dimension_that_m_does_not_divide():
    assert message_of(lambda x: scatter_to(x, "mp")) == (
        "scatter_to: got x with shape (2, 6); axis 1 (6) is not divisible by the 4 devices along "
        "axis_name='mp'. Pad it to 8 and mask what was added, or take a number of devices that "
        "divides 6."
    )
    message = message_of(lambda x: scatter_to(x, ("dp", "mp"), 0))
    assert "axis 0 (2) is not divisible by the 8 devices along axis_name=('dp', 'mp')" in message


@pytest.mark.parametrize("operator", [gather_from, scatter_to], ids=lambda f: f.__name__)
def test_an_axis_that_x_does_not_have(operator):
    api = operator.__name__
    for axis in (2, -3):
        assert message_of(lambda x, axis=axis: operator(x, "mp", axis)) == (
            f"{api}: got axis={axis} for x with shape (2, 6), needed -2 <= axis < 2. Give the "
            "dimension that is split over the devices."
        )
    message = message_of(lambda x: operator(x[0, 0], "mp"))
    assert f"{api}: got axis=-1 for x with shape (), needed a rank of at least 1." in message
