"""in_specs and grad_specs on Explicit axes and inside an outer region."""

import helpers
import jax
import jax.numpy as jnp
import layouts
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from specs_model import BATCH, MODEL, PARAMS, REPLICATED, SPLIT, decorate, expected, mesh_of, spec

import gradaccum


def explicit(specs, **sizes):
    mesh = mesh_of(AxisType.Explicit, **sizes)
    return mesh, layouts.place(PARAMS, mesh, specs)


@pytest.mark.parametrize("given", ["grad_specs", "in_specs"])
def test_on_explicit_axes_jax_grad_refuses_gradients_laid_out_otherwise(given):
    mesh, params = explicit(REPLICATED)
    fun = decorate(mesh=None, **{given: (SPLIT,)})
    message = (
        r"params\['block'\]\['v'\], float32\[16,8\], has its gradient as .*'dp'.*; "
        r"params\['block'\]\['w'\], float32\[8,16\], has its gradient as .*None, 'dp'\)\. "
        "A cotangent must have its primal's type, on Explicit axes its sharding. Use "
        r"loss_fn.value_and_grad\(\.\.\.\)"
    )
    with jax.set_mesh(mesh):
        for run in (jax.grad(fun), jax.jit(jax.value_and_grad(fun))):
            with pytest.raises(ValueError, match=f"^accumulate: {message}"):
                run(params, BATCH)
        got = layouts.jit(fun.value_and_grad())(params, BATCH)
    assert jax.tree.map(spec, got[1]) == SPLIT
    helpers.assert_close(got, expected(), within=2e-5)


@pytest.mark.parametrize("given", ["grad_specs", "in_specs"])
def test_on_explicit_axes_a_model_axis_of_the_type_on_a_data_axis_dimension(given):
    mesh, params = explicit(MODEL, dp=4, mp=2)
    fun = decorate(mesh=None, **{given: (SPLIT,)})
    message = (
        rf"{given} of params\['block'\]\['v'\], shape \(16, 8\), is .*'dp'.*: axis 0 is split over "
        r"mp too, an automatic model axis; .*\['w'\], shape \(8, 16\), is .*: axis 1 is split"
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"^accumulate: {message}"):
        fun.value_and_grad()(params, BATCH)


def test_in_an_outer_region_jax_grad_refuses_gradients_of_another_shape():
    mesh, fun = mesh_of(), decorate(mesh=None, grad_specs=(SPLIT,))
    for run, refused in ((jax.grad(fun), True), (fun.value_and_grad(), False)):
        out = SPLIT if refused else (P(), SPLIT)
        outer = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("dp")), out_specs=out)
        if refused:
            message = (
                r"params\['block'\]\['v'\], float32\[16,8\].*, has its gradient as .*'dp'.* inside "
                r"shard_map it has its local shape. Use loss_fn.value_and_grad"
            )
            with pytest.raises(ValueError, match=f"^accumulate: {message}"):
                jax.jit(outer)(PARAMS, BATCH)
        else:
            helpers.assert_close(layouts.jit(outer)(PARAMS, BATCH), expected(), within=2e-5)


def test_in_an_outer_region_a_model_axis_that_is_not_manual_there():
    fun = decorate(mesh=None, in_specs=(MODEL,))
    outer = jax.shard_map(
        fun.value_and_grad(), mesh=mesh_of(dp=4, mp=2), in_specs=(P(), P("dp")), out_specs=P(),
        axis_names={"dp"}, check_vma=False,
    )  # fmt: skip
    message = (
        r"in_specs of params\['block'\]\['v'\], shape \(16, 8\), is .*'mp'.*: not manual in the "
        r"outer shard_map; .*\['w'\].*\. Make mp manual there"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        jax.jit(outer)(PARAMS, BATCH)


def test_in_an_outer_region_jax_grad_refuses_gradients_in_another_order():
    mesh = layouts.mesh_of({"a": 2, "b": 2})
    fun = gradaccum.accumulate(
        lambda w, x: jnp.mean((x @ w) ** 2),
        microbatches=2,
        axis_name=("a", "b"),
        in_specs=(P(("a", "b")),),
        grad_specs=(P(("b", "a")),),
    )
    specs = {"in_specs": (P(("a", "b")), P(("a", "b"))), "out_specs": P(("b", "a"))}
    outer = jax.shard_map(jax.grad(fun), mesh=mesh, check_vma=False, **specs)
    with pytest.raises(ValueError, match=r"has its gradient as .*'b', 'a'.*value_and_grad"):
        jax.eval_shape(outer, jnp.ones((8, 4)), jnp.ones((16, 8)))


def test_the_message_names_the_spec_that_is_wrong():
    """The parameter's, where its gradient lies well."""
    mesh = layouts.mesh_of({"dp": 2, "mp": 2}, AxisType.Explicit)
    fun = gradaccum.accumulate(
        lambda w, x: jnp.mean((x @ w) ** 2),
        microbatches=2,
        axis_name="dp",
        in_specs=(P("dp"),),
        grad_specs=(P(None, "dp"),),
    )
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("mp")))
        with pytest.raises(ValueError, match=r"^accumulate: in_specs of w, .*axis 0 is split"):
            fun.value_and_grad()(w, jnp.ones((16, 8)))
