"""Sharded parameters of all kinds in one tree: any layout of a leaf and of its gradient."""

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layouts import WITHIN

import gradaccum
from gradaccum.tensor_parallel import reduce_from

BOTH, REVERSED = ("replica", "fsdp"), ("fsdp", "replica")
# parameter, gradient: each leaf [8, 16]
ORDERS = {
    "replicated": (P(), P()),
    "minor dimension": (P(None, "fsdp"), P(None, "fsdp")),
    "over both": (P(BOTH), P(BOTH)),
    "over both, reversed": (P(REVERSED), P(REVERSED)),
    "each on its own dimension": (P("replica", "fsdp"), P("replica", "fsdp")),
    "each on the other": (P("fsdp", "replica"), P("fsdp", "replica")),
    "zero": (P(), P("fsdp")),
    "zero over both": (P(), P(BOTH)),
    "zero over both, reversed": (P(), P(None, REVERSED)),
    "zero on both dimensions": (P(), P("replica", "fsdp")),
    "over more": (P("fsdp"), P(REVERSED)),
    "over more, the new one major": (P("fsdp"), P(BOTH)),
    "over another dimension too": (P("fsdp"), P("fsdp", "replica")),
    "over fewer": (P(BOTH), P("replica")),
    "over none": (P(BOTH), P()),
    "over others": (P("fsdp"), P("replica")),
    "moved to another dimension": (P("fsdp"), P(None, "fsdp")),
    "reversed": (P(BOTH), P(REVERSED)),
    "exchanged": (P("fsdp", "replica"), P("replica", "fsdp")),
}


def product(params, batch, f=lambda x: x, g=lambda x: x):
    """The mean over rows and leaves: of every leaf each entry has a gradient of its own."""
    names = sorted(params)
    each = [jnp.sin(g(f(batch["x"]) @ params[n] + i)) * batch["y"] for i, n in enumerate(names)]
    return jnp.mean(sum(each))


def product_case(names):
    params = {n: helpers.normal(i, 8, 16).astype(np.float32) for i, n in enumerate(names)}
    batch = {"x": helpers.normal(98, 32, 8), "y": helpers.normal(99, 32, 16)}
    batch = jax.tree.map(lambda x: x.astype(np.float32), batch)
    return params, batch, layouts.in_float64(jax.value_and_grad(product), params, batch)


@pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_any_layout_of_parameter_and_gradient(kind, typed):
    mesh = layouts.mesh_of({"replica": 2, "fsdp": 4}, kind)
    params, batch, want = product_case(ORDERS)
    places, moved = ({n: s[i] for n, s in ORDERS.items()} for i in (0, 1))
    fun = gradaccum.accumulate(
        product,
        microbatches=2,
        axis_name=BOTH,
        in_specs=(places,),
        grad_specs=(moved,),
        check_vma=typed,
    )
    ways = [fun.value_and_grad()]
    if kind == AxisType.Auto and not typed:
        ways.append(jax.value_and_grad(fun))
    with jax.set_mesh(mesh):
        for grad in ways:
            got = layouts.jit(grad)(layouts.place(params, mesh, places), batch)
            layouts.assert_lies(got[1], mesh, moved)
            helpers.assert_close(got, want, within=WITHIN)


# columns over mp: the product's result is split, and its loss a sum of shards
TOGETHER = {
    "columns": (P(None, "mp"), P(None, "mp")),
    "rows fsdp": (P("fsdp", "mp"), P("fsdp", "mp")),
    "rows zero": (P(None, "mp"), P("fsdp", "mp")),
    "columns fsdp": (P(None, ("mp", "fsdp")), P(None, ("mp", "fsdp"))),
    "columns zero": (P(None, "mp"), P(None, ("mp", "fsdp"))),
    "columns of fsdp, rows of zero": (P(None, ("mp", "fsdp")), P("fsdp", "mp")),
}


@pytest.mark.parametrize("typed", [False, True], ids=["operators", "psum"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_any_layout_beside_a_manual_model_axis(kind, typed):
    mesh = layouts.mesh_of({"fsdp": 4, "mp": 2}, kind)
    params, batch, want = product_case(TOGETHER)
    places, moved = ({n: s[i] for n, s in TOGETHER.items()} for i in (0, 1))

    def loss_fn(params, batch):
        """This device's columns; y is split over mp too, by hand."""
        size = 16 // jax.lax.axis_size("mp")
        start = jax.lax.axis_index("mp") * size
        y = jax.lax.dynamic_slice_in_dim(batch["y"], start, size, 1)
        mean = product(params, batch | {"y": y}) / 2
        return jax.lax.psum(mean, "mp") if typed else reduce_from(mean, "mp")

    fun = gradaccum.accumulate(
        loss_fn,
        microbatches=2,
        axis_name="fsdp",
        in_specs=(places,),
        grad_specs=[moved],
        check_vma=typed,
    )
    with jax.set_mesh(mesh):
        got = layouts.jit(fun.value_and_grad())(layouts.place(params, mesh, places), batch)
    layouts.assert_lies(got[1], mesh, moved)
    helpers.assert_close(got, want, within=WITHIN)


@pytest.mark.parametrize("layout", ["zero", "fsdp"])
def test_one_array_at_two_places(layout):
    """Tied by the caller: each place has its own gradient, in its own layout."""
    table = helpers.normal(0, 8, 16).astype(np.float32)
    mesh = layouts.mesh_of({"dp": 8})
    _, batch, _ = product_case("a")
    want = layouts.in_float64(jax.value_and_grad(product), {"a": table, "b": table}, batch)
    in_specs = {"a": P("dp"), "b": P("dp")} if layout == "fsdp" else {"a": P(), "b": P()}
    grad_specs = {"a": P("dp"), "b": P(None, "dp")}
    fun = gradaccum.accumulate(
        product, microbatches=2, mesh=mesh, in_specs=(in_specs,), grad_specs=(grad_specs,)
    )
    table = jax.device_put(table, jax.NamedSharding(mesh, in_specs["a"]))
    got = layouts.jit(jax.value_and_grad(fun))({"a": table, "b": table}, batch)
    layouts.assert_lies(got[1], mesh, grad_specs)
    helpers.assert_close(got, want, within=WITHIN)


@pytest.mark.parametrize("named", ["up", "down"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_leaves_that_do_not_name_an_automatic_model_axis_stay_sharded_on_it(kind, named):
    """Beside one that does: what is said of one leaf says nothing of another."""
    mesh = layouts.mesh_of({"fsdp": 4, "mp": 2}, kind)
    params, batch = layouts.init_pair(), layouts.pair_batch()
    places = {"up": P("fsdp", "mp"), "down": P("mp", "fsdp"), "bias": P()}
    fun = gradaccum.accumulate(
        layouts.pair_loss,
        microbatches=2,
        axis_name="fsdp",
        in_specs=({"up": P("fsdp"), "down": P(None, "fsdp"), "bias": None},),
        grad_specs=(dict.fromkeys(places) | {named: places[named]},),
    )
    want = layouts.in_float64(jax.value_and_grad(layouts.pair_loss), params, batch)
    with jax.set_mesh(mesh):
        placed = layouts.place(params, mesh, places)
        for grad in (jax.value_and_grad(fun), fun.value_and_grad()):
            got = layouts.jit(grad)(placed, batch)
            layouts.assert_lies(got[1], mesh, places)
            helpers.assert_close(got, want, within=WITHIN)


@pytest.mark.parametrize("layout", ["in_specs", "grad_specs"])
@pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])
def test_check_vma_without_a_model_axis(typed, layout):
    """Complex leaves as well: there the wire's dtype is complex too."""
    mesh = layouts.mesh_of({"dp": 8})
    params, batch, _ = product_case("ab")
    params["b"] = (params["b"] + 1j * params["a"]).astype(np.complex64)

    def loss_fn(params, batch):
        return product({n: jnp.abs(p) for n, p in params.items()}, batch)

    want = jax.device_get(jax.value_and_grad(loss_fn)(params, batch))
    specs = {"a": P("dp"), "b": P(None, "dp")}
    fun = gradaccum.accumulate(
        loss_fn, microbatches=2, mesh=mesh, check_vma=typed, **{layout: (specs,)}
    )
    got = layouts.jit(jax.value_and_grad(fun))(params, batch)
    layouts.assert_lies(got[1], mesh, specs)
    helpers.assert_close(got, want, within=WITHIN)
