"""Sharded parameters under second derivatives and vmap, and inside an outer shard_map."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layouts import in_float64, init_pair, jit, pair_batch, pair_loss

import gradaccum
from gradaccum.tensor_parallel import copy_to, reduce_from

WITHIN = 2e-5  # of the largest entry of a leaf, float32
SPECS = {"up": P("dp"), "down": P(None, "dp"), "bias": P()}
ZERO, FSDP = {"grad_specs": (SPECS,)}, {"in_specs": (SPECS,)}


@functools.cache
def mesh_of(**sizes):
    return layouts.mesh_of(sizes)


TANGENT = {
    name: helpers.normal(i, *x.shape).astype(np.float32)
    for i, (name, x) in enumerate(init_pair().items(), 20)
}


def dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def dot_of_shards(a, b):
    """The same inside a manual region."""
    parts = {n: jnp.vdot(a[n], b[n]) for n in a}
    return sum(reduce_from(x, "dp") if n != "bias" else x for n, x in parts.items())


def reverse_over_reverse(f, dot=dot):
    return lambda p, b, t: jax.grad(lambda p: dot(jax.grad(f)(p, b), t))(p)


def reverse_over_method(f, dot=dot):
    grad = getattr(f, "value_and_grad", lambda: jax.value_and_grad(f))()
    return lambda p, b, t: jax.grad(lambda p: dot(grad(p, b)[1], t))(p)


def forward_over_reverse(f, dot=dot):
    return lambda p, b, t: jax.jvp(lambda p: jax.grad(f)(p, b), (p,), (t,))[1]


def vmap_of_grad(f, dot=dot):
    def many(p, b, t):
        both = jax.tree.map(lambda x, t: jnp.stack([x, x - t]), p, t)
        return jax.vmap(jax.value_and_grad(f), in_axes=(0, None))(both, b)

    return many


def vmap_over_batches(f, dot=dot):
    def many(p, b, t):
        both = jax.tree.map(lambda x: jnp.stack([x, -x]), b)
        return jax.vmap(jax.value_and_grad(f), in_axes=(None, 0))(p, both)

    return many


def gradient_norm(f, dot=dot):
    def penalised(p, b, t):
        loss, grads = jax.value_and_grad(f)(p, b)
        return loss + dot(grads, grads)

    return jax.value_and_grad(penalised)


def gradient_alone(f, dot=dot):
    return lambda p, b, t: jax.value_and_grad(f)(p, b)


PRODUCTS = [reverse_over_reverse, reverse_over_method, forward_over_reverse]
VMAPS = [vmap_of_grad, vmap_over_batches]
TRANSFORMATIONS = [*PRODUCTS, *VMAPS, gradient_norm]


@functools.cache
def transformed(transformation):
    return in_float64(transformation(pair_loss), init_pair(), pair_batch(), TANGENT)


named = functools.partial(pytest.mark.parametrize, ids=lambda x: getattr(x, "__name__", str(x)))


@named("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("layout", [ZERO, FSDP], ids=["zero", "fsdp"])
def test_transformations_of_sharded_parameters(layout, transformation):
    fun = gradaccum.accumulate(pair_loss, microbatches=2, mesh=mesh_of(dp=8), fused=False, **layout)
    got = jit(transformation(fun))(init_pair(), pair_batch(), TANGENT)
    helpers.assert_close(got, transformed(transformation), within=WITHIN)


MODEL_SPECS = {"up": P("dp", "mp"), "down": P("mp", "dp"), "bias": P()}


@named("transformation", [*PRODUCTS, vmap_of_grad])
@pytest.mark.parametrize("typed", [False, True], ids=["operators", "psum"])
def test_transformations_beside_a_manual_model_axis(typed, transformation):
    if typed:
        operators = {"g": lambda x: jax.lax.psum(x, "mp")}
    else:
        operators = {"f": lambda x: copy_to(x, "mp"), "g": lambda x: reduce_from(x, "mp")}
    fun = gradaccum.accumulate(
        functools.partial(pair_loss, **operators),
        microbatches=2,
        axis_name="dp",
        mesh=mesh_of(dp=4, mp=2),
        in_specs=(MODEL_SPECS,),
        fused=False,
        check_vma=typed,
    )
    if not typed and transformation is forward_over_reverse:
        # the operators have a rule of their own for the reverse mode alone
        with pytest.raises(TypeError, match=r"can't apply forward-mode .* to a custom_vjp"):
            jit(transformation(fun))(init_pair(), pair_batch(), TANGENT)
        return
    got = jit(transformation(fun))(init_pair(), pair_batch(), TANGENT)
    helpers.assert_close(got, transformed(transformation), within=WITHIN)


# --- Inside an outer shard_map: the shapes are local ---------------------------------------------


@named("transformation", [gradient_alone, *PRODUCTS, *VMAPS])
@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_inside_an_outer_shard_map(check_vma, transformation):
    """Shards in, gathered inside; the gradient is that of the shard."""
    fun = gradaccum.accumulate(pair_loss, microbatches=2, axis_name="dp", fused=False, **FSDP)
    rows = P(None) if transformation in VMAPS else P()
    grads = jax.tree.map(lambda s: P(*rows, *s), SPECS)
    outer = jax.shard_map(
        transformation(fun, dot_of_shards),
        mesh=mesh_of(dp=8),
        in_specs=(SPECS, P("dp"), SPECS),
        out_specs=grads if transformation in PRODUCTS else (P(), grads),
        check_vma=check_vma,
    )
    if not check_vma and transformation is forward_over_reverse:
        # Where JAX does not know what is replicated, sum and copies are a custom_vjp pair.
        with pytest.raises(TypeError, match=r"can't apply forward-mode .* to a custom_vjp"):
            jit(outer)(init_pair(), pair_batch(), TANGENT)
        return
    got = jit(outer)(init_pair(), pair_batch(), TANGENT)
    helpers.assert_close(got, transformed(transformation), within=WITHIN)


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("axes", [("dp", "mp"), ("dp",)], ids="-".join)
def test_inside_an_outer_shard_map_with_a_model_axis(axes, check_vma):
    """ZeRO of this device's shard of mp, by value_and_grad; or mp left automatic there."""
    manual = "mp" in axes
    operators = {"f": lambda x: copy_to(x, "mp"), "g": lambda x: reduce_from(x, "mp")}
    only = lambda s: s if manual else P(*[a if a == "dp" else None for a in s])  # noqa: E731
    shard = {"up": P(None, "mp"), "down": P("mp"), "bias": P()}
    in_specs = jax.tree.map(only, shard)
    out = jax.tree.map(only, MODEL_SPECS)
    fun = gradaccum.accumulate(
        functools.partial(pair_loss, **operators) if manual else pair_loss,
        microbatches=2,
        axis_name="dp",
        in_specs=(in_specs,),
        grad_specs=(out,),
    )
    outer = jax.shard_map(
        fun.value_and_grad(),
        mesh=mesh_of(dp=4, mp=2),
        in_specs=(in_specs, P("dp")),
        out_specs=(P(), out),
        axis_names=set(axes),
        check_vma=check_vma,
    )
    placed = layouts.place(init_pair(), mesh_of(dp=4, mp=2), shard)
    got = jit(outer)(placed, pair_batch())
    layouts.assert_lies(got[1], mesh_of(dp=4, mp=2), MODEL_SPECS)
    helpers.assert_close(got, transformed(gradient_alone), within=WITHIN)


@pytest.mark.parametrize("how", ["grad", "method"])
@pytest.mark.parametrize("specs", [None, SPECS], ids=["replicated", "fsdp"])
@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_inside_an_outer_shard_map_over_the_model_axis_alone(check_vma, specs, how):
    """The data axis is opened inside; where the outer region has types, so has the result."""
    operators = {"f": lambda x: copy_to(x, "mp"), "g": lambda x: reduce_from(x, "mp")}
    fun = gradaccum.accumulate(
        functools.partial(pair_loss, **operators),
        microbatches=2,
        axis_name="dp",
        in_specs=None if specs is None else (specs,),
    )
    run = jax.value_and_grad(fun) if how == "grad" else fun.value_and_grad()
    shard, varying = {"up": P(None, "mp"), "down": P("mp"), "bias": P()}, []

    def local(p, batch):
        loss, grads = run(p, batch)
        kinds = {n: getattr(jax.typeof(g), "manual_axis_type", None) for n, g in grads.items()}
        varying.append({n: bool(kind and kind.varying) for n, kind in kinds.items()})
        return loss, grads

    with jax.set_mesh(mesh_of(dp=4, mp=2)):
        outer = jax.shard_map(
            local, in_specs=(shard, P()), out_specs=(P(), shard), axis_names={"mp"},
            check_vma=check_vma,
        )  # fmt: skip
        got = jit(outer)(init_pair(), pair_batch())
    helpers.assert_close(got, transformed(gradient_alone), within=WITHIN)
    assert varying[0] == {"up": check_vma, "down": check_vma, "bias": False}
