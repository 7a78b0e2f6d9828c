"""The Megatron operators inside transformations, and on each dtype and type of value."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layouts import in_float64, jit
from model_axis import mesh_of, modes
from over_mp import OVER_MP, Y, sharded, weigh

from gradaccum.tensor_parallel import copy_to, gather_from, reduce_from, scatter_to

# --- Inside transformations ----------------------------------------------------------------------


def stack(p, x, f, g, scatter, gather):
    """A scan over recomputed layers, on each example by vmap; every operator in each layer."""

    @jax.checkpoint
    def layer(h, w):
        def one(h):
            up = jnp.tanh(f(h) @ w["up"])
            return h + g(up @ w["down"]) + gather(jnp.sin(scatter(h)))

        return jax.vmap(one)(h), None

    h, _ = jax.lax.scan(layer, x, p)
    return weigh(h)


STACK = {
    "up": helpers.normal(6, 2, 4, 4).astype(np.float32) / 2,
    "down": helpers.normal(7, 2, 4, 4).astype(np.float32) / 2,
}
STACK_SPECS = {"up": P(None, None, "mp"), "down": P(None, "mp")}
STACK_OVER_MP = OVER_MP | {
    "scatter": lambda x: scatter_to(x, "mp"),
    "gather": lambda x: gather_from(x, "mp"),
}
IDENTITIES = dict.fromkeys(STACK_OVER_MP, lambda x: x)
H = helpers.normal(8, 3, 4).astype(np.float32)


@modes
def test_scan_remat_and_vmap(typed):
    fun = jax.value_and_grad(functools.partial(stack, **STACK_OVER_MP), argnums=(0, 1))
    specs = (STACK_SPECS, P())
    got = jit(sharded(fun, mesh_of(2), specs, (P(), specs), typed))(STACK, H)
    want = jax.value_and_grad(functools.partial(stack, **IDENTITIES), argnums=(0, 1))
    helpers.assert_close(got, in_float64(want, STACK, H), "float32")


@modes
def test_second_derivatives(typed):
    """The gradient of the squared norm of the gradient, through every operator."""

    def penalty(p, h, operators):
        grads, grad_h = jax.grad(stack, argnums=(0, 1))(p, h, **operators)
        parts = sum(jnp.sum(g**2) for g in grads.values())
        return operators["g"](parts) + jnp.sum(grad_h**2)

    fun = jax.grad(functools.partial(penalty, operators=STACK_OVER_MP), argnums=(0, 1))
    specs = (STACK_SPECS, P())
    got = jit(sharded(fun, mesh_of(2), specs, specs, typed))(STACK, H)
    want = jax.grad(functools.partial(penalty, operators=IDENTITIES), argnums=(0, 1))
    helpers.assert_close(got, in_float64(want, STACK, H), "float32")


@modes
def test_third_derivatives(typed):
    """Along fixed directions, where a rule that calls no rule of its own is right twice only."""

    def fun(y, f, g, scatter, gather):
        part = jnp.sin(scatter(y) ** 2)
        return weigh(gather(part)) + g(jnp.sum(part * f(jnp.cos(y).mean())))

    def along(fun, order):
        if not order:
            return fun
        return lambda y: jnp.sum(jax.grad(along(fun, order - 1))(y) * jnp.flip(y))

    got = jit(
        sharded(along(functools.partial(fun, **STACK_OVER_MP), 3), mesh_of(2), P(), P(), typed)
    )
    want = along(functools.partial(fun, **IDENTITIES), 3)
    helpers.assert_close(got(Y[0, :2]), in_float64(want, Y[0, :2]), "float32")


def test_forward_mode_is_there_where_types_are_checked():
    def fun(y):
        return weigh(gather_from(jnp.sin(copy_to(y, "mp")), "mp")) + reduce_from(y.sum(), "mp")

    def jvp(y, t):
        return jax.jvp(fun, (y,), (t,))

    spec = P(None, None, "mp")
    got = jit(sharded(jvp, mesh_of(2), (spec, spec), P(), True))(Y, Y / 3)
    want = functools.partial(jax.jvp, lambda y: weigh(jnp.sin(y)) + y.sum())
    helpers.assert_close(got, in_float64(lambda y, t: want((y,), (t,)), Y, Y / 3), "float32")


# --- Dtypes and types ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
@modes
def test_dtypes(typed, dtype):
    def loss(w, x, f, g, scatter, gather):
        y = gather(f(x) * w)
        part = scatter(y * y) * w
        return jnp.real(g(jnp.sum(part * part.conj())))

    with jax.enable_x64(dtype == "float64"):
        w, x = (helpers.normal(i, *s).astype(jnp.dtype(dtype)) for i, s in ((0, [4]), (1, [1])))
        if dtype == "complex64":
            w, x = w + 1j * w[::-1], x * (1 + 0.5j)
        want = jit(jax.value_and_grad(functools.partial(loss, **IDENTITIES), argnums=(0, 1)))(w, x)
        fun = jax.value_and_grad(functools.partial(loss, **STACK_OVER_MP), argnums=(0, 1))
        specs = (P("mp"), P())
        got = jit(sharded(fun, mesh_of(2), specs, (P(), specs), typed))(w, x)
    assert [g.dtype for g in got[1]] == [dtype, dtype]
    helpers.assert_close(got, want, {"complex64": "complex64"}.get(dtype))


@modes
def test_integers_and_python_scalars_pass_forward(typed):
    def fun(ids):
        whole = gather_from(copy_to(ids, "mp"), "mp")
        return whole, reduce_from(ids, "mp"), reduce_from(1.5, "mp"), scatter_to(whole, "mp")

    ids = np.arange(4, dtype=np.int32)
    out = jit(sharded(fun, mesh_of(2), P("mp"), (P(), P(), P(), P("mp")), typed))(ids)
    for got, want in zip(out, ([0, 1, 2, 3], [2, 4], 3.0, [0, 1, 2, 3]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_varies_already_is_copied_and_sliced_as_it_is():
    def loss(x):
        x = copy_to(copy_to(x, "mp"), "mp")
        return reduce_from(weigh(scatter_to(x, "mp")), "mp")

    got = jit(sharded(jax.grad(loss), mesh_of(2), P(), P(), True))(Y)
    want = jax.grad(lambda y: weigh(y[..., :2]) + weigh(y[..., 2:]))
    helpers.assert_close(got, in_float64(want, Y), "float32")


@modes
def test_what_is_replicated_already_is_summed_and_gathered_m_times(typed):
    """In types such a value's gradient counts each copy; untyped, `copy_to` says that it is one."""

    def loss(x):
        x = copy_to(x, "mp")
        return reduce_from(jnp.sum(x**2), "mp") + weigh(gather_from(x, "mp"))

    got = jit(sharded(jax.value_and_grad(loss), mesh_of(2), P(), P(), typed))(Y)
    want = jax.value_and_grad(lambda y: 2 * jnp.sum(y**2) + weigh(jnp.concatenate([y, y], -1)))
    helpers.assert_close(got, in_float64(want, Y), "float32")


def test_what_varies_over_one_of_two_axes():
    """One copy on each device of the other axis: the sum counts them all, and so do gradients."""

    def loss(x):
        return reduce_from(jnp.sum(x**2), ("a", "b")) + weigh(gather_from(x, ("b", "a"), 0))

    mesh = mesh_of(2, 2, names=("a", "b"))
    fun = jit(sharded(jax.value_and_grad(loss), mesh, P("a"), (P(), P("a")), True))
    want = jax.value_and_grad(lambda y: 2 * jnp.sum(y**2) + weigh(jnp.concatenate([y, y])))
    helpers.assert_close(fun(Y), in_float64(want, Y), "float32")
