"""Derivatives of the decorated loss beyond the first, and its other transformations."""

import functools

import helpers
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from nonlinear_loss import BATCH, MASKED, PARAMS, TANGENT, K, jit, loss_fn, on

import gradaccum


def dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def reverse_over_reverse(f):
    return lambda p, b: jax.grad(lambda p: dot(jax.grad(f)(p, b), TANGENT))(p)


def reverse_over_method(f):
    """Through `.value_and_grad`, which has no rule of its own in the way, where there is one."""
    grad = getattr(f, "value_and_grad", lambda: jax.value_and_grad(f))()
    return lambda p, b: jax.grad(lambda p: dot(grad(p, b)[1], TANGENT))(p)


def forward_over_reverse(f):
    return lambda p, b: jax.jvp(lambda p: jax.grad(f)(p, b), (p,), (TANGENT,))[1]


def third(f):
    """The gradient of a squared Hessian-vector product."""
    product = reverse_over_reverse(f)
    return jax.grad(lambda p, b: dot(product(p, b), product(p, b)))


def gradient_norm(f):
    """The gradient of a loss plus its squared gradient norm."""

    def penalised(p, b):
        loss, grads = jax.value_and_grad(f)(p, b)
        return loss + dot(grads, grads)

    return jax.value_and_grad(penalised)


def hessian(f):
    return lambda p, b: jax.hessian(lambda out: f(p | {"out": out}, b))(p["out"])


def of_the_batch(f):
    """Mixed: the parameters' gradient, differentiated with respect to the batch."""
    return lambda p, b: jax.grad(lambda x: dot(jax.grad(f)(p, b | {"x": x}), TANGENT))(b["x"])


def vmap_over_params(f):
    many = lambda p: jax.tree.map(lambda x, t: jnp.stack([x, t, x - t]), p, TANGENT)  # noqa: E731
    return lambda p, b: jax.vmap(f, in_axes=(0, None))(many(p), b)


def vmap_of_grad_over_params(f):
    many = lambda p: jax.tree.map(lambda x, t: jnp.stack([x, t, x - t]), p, TANGENT)  # noqa: E731
    return lambda p, b: jax.vmap(jax.value_and_grad(f), in_axes=(0, None))(many(p), b)


def vmap_over_batches(f):
    def many(b):
        return jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), b)

    return lambda p, b: jax.vmap(jax.value_and_grad(f), in_axes=(None, 0))(p, many(b))


def grad_of_vmap(f):
    many = lambda b: jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), b)  # noqa: E731
    return jax.grad(lambda p, b: jnp.sum(jax.vmap(f, in_axes=(None, 0))(p, many(b)) ** 2))


def of_checkpoint(f):
    return jax.value_and_grad(jax.checkpoint(f))


def of_jit(f):
    return jax.value_and_grad(jax.jit(lambda p, b: 2 * jax.jit(f)(p, b) ** 2))


def through_a_scan(f):
    """Three steps of gradient descent inside, and the gradient of where they end."""

    def trained(p, b):
        def step(p, _):
            loss, grads = jax.value_and_grad(f)(p, b)
            return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), loss

        p, losses = jax.lax.scan(step, p, length=3)
        return f(p, b) + jnp.sum(losses)

    return jax.value_and_grad(trained)


def of_a_scan_over_batches(f):
    """The decorated loss in a scan's body, differentiated from outside."""

    def total(p, b):
        return jax.lax.scan(lambda c, s: (c + f(p, b | {"x": s * b["x"]}), None), 0.0, SCALES)[0]

    return jax.value_and_grad(total)


SCALES = jnp.array([1.0, 0.5, -2.0])
TRANSFORMATIONS = [
    reverse_over_reverse,
    reverse_over_method,
    forward_over_reverse,
    third,
    gradient_norm,
    hessian,
    of_the_batch,
    vmap_over_params,
    vmap_of_grad_over_params,
    vmap_over_batches,
    grad_of_vmap,
    of_checkpoint,
    of_jit,
    through_a_scan,
    of_a_scan_over_batches,
]
named = functools.partial(pytest.mark.parametrize, ids=lambda x: getattr(x, "__name__", str(x)))


@functools.cache
def expected(transformation, weighted):
    return jit(transformation(loss_fn))(PARAMS, MASKED if weighted else BATCH)


@named("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("where", ["alone", "mesh"])
def test_v18_vmap_and_derivatives_equal_those_of_the_undecorated_loss(where, transformation):
    got = jit(transformation(on(where)))(PARAMS, BATCH)
    helpers.assert_close(got, expected(transformation, False))


@named("transformation", [forward_over_reverse, gradient_norm, vmap_over_params, through_a_scan])
@pytest.mark.parametrize("where", ["alone", "mesh"])
def test_with_weights_equals_that_of_the_undecorated_loss(where, transformation):
    got = jit(transformation(on(where, weighted=True)))(PARAMS, MASKED)
    helpers.assert_close(got, expected(transformation, True))


@named("transformation", [reverse_over_reverse, of_checkpoint, of_jit])
def test_with_overlap_equals_that_of_the_undecorated_loss(transformation):
    got = jit(transformation(on("mesh", overlap=True)))(PARAMS, BATCH)
    helpers.assert_close(got, expected(transformation, False))


@named("transformation", [of_jit, of_checkpoint])
@pytest.mark.parametrize("where", ["alone", "mesh"])
def test_first_derivatives_of_a_fused_loss_inside_jit_and_checkpoint(where, transformation):
    got = jit(transformation(on(where, fused=True)))(PARAMS, BATCH)
    helpers.assert_close(got, expected(transformation, False))


# --- Inside an outer shard_map -------------------------------------------------------------------

grad_alone = jax.value_and_grad
IN_MANUAL_REGION = [
    grad_alone,
    reverse_over_reverse,
    forward_over_reverse,
    third,
    gradient_norm,
    hessian,
    of_the_batch,
    vmap_over_params,
    vmap_of_grad_over_params,
    of_checkpoint,
    through_a_scan,
]


@named("transformation", IN_MANUAL_REGION)
@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_inside_an_outer_shard_map(check_vma, transformation):
    """The data axis is manual already: the batch is local, all else is replicated."""
    fun = gradaccum.accumulate(loss_fn, microbatches=K, axis_name="dp", fused=False)
    outer = jax.shard_map(
        transformation(fun),
        mesh=helpers.data_mesh(8),
        in_specs=(P(), P("dp")),
        out_specs=P("dp") if transformation is of_the_batch else P(),
        check_vma=check_vma,
    )
    if not check_vma and transformation in (forward_over_reverse, hessian):
        # Where JAX does not know what is replicated, sum and copies are a custom_vjp pair.
        with pytest.raises(TypeError, match=r"can't apply forward-mode .* to a custom_vjp"):
            jit(outer)(PARAMS, BATCH)
        return
    helpers.assert_close(jit(outer)(PARAMS, BATCH), expected(transformation, False))


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_mixed_derivatives_inside_an_outer_shard_map(check_vma):
    """A parameter that the inner gradient does not take is replicated all the same."""
    fun = gradaccum.accumulate(loss_fn, microbatches=K, axis_name="dp", fused=False)

    def mixed(f):
        first, *rest = sorted(PARAMS)

        def of_rest(others, params, batch):
            one = jax.grad(lambda x: f({**params, **others, first: x}, batch))(params[first])
            return sum(jnp.vdot(x, x) for x in jax.tree.leaves(one))

        return lambda p, b: jax.grad(of_rest)({n: p[n] for n in rest}, p, b)

    outer = jax.shard_map(
        mixed(fun),
        mesh=helpers.data_mesh(8),
        in_specs=(P(), P("dp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    helpers.assert_close(jit(outer)(PARAMS, BATCH), jit(mixed(loss_fn))(PARAMS, BATCH))


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_fused_inside_an_outer_shard_map(check_vma):
    fun = gradaccum.accumulate(loss_fn, microbatches=K, axis_name="dp")
    for grad in (jax.value_and_grad(fun), fun.value_and_grad()):
        outer = jax.shard_map(
            grad,
            mesh=helpers.data_mesh(8),
            in_specs=(P(), P("dp")),
            out_specs=P(),
            check_vma=check_vma,
        )
        assert helpers.count_in_place(outer, PARAMS, BATCH) == 1
        helpers.assert_close(jit(outer)(PARAMS, BATCH), expected(grad_alone, False))
