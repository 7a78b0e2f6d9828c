"""Sharded parameters, by specs alone: values of whole training runs against the unsharded run."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS
from optax.microbatching import AccumulationType as Kind

import gradaccum
from gradaccum.tensor_parallel import reduce_from

STEPS = 3
WITHIN = 2e-5  # of the largest entry of a leaf, float32

# Of these each leaf is in `ORDERS` or `TOGETHER` below.
OTHERS = ("hsdp-replicated", "hsdp-gradients-over-both", "typed-fsdp-together")
FACTORS = {
    "layout": tuple(name for name in LAYOUTS if name not in OTHERS),
    "axis": ("Auto", "Explicit"),
    "through": ("grad", "method"),
    "k": (1, 4),
    "reduction": ("mean", "tokens"),
    "fused": (True, False),
    "overlap": (True, False),
    "clip": (True, False),
    "has_aux": (True, False),
}
GRID = helpers.pairwise(FACTORS)
AUX = {"rows": Kind.CONCAT, "tokens": Kind.SUM}


def name_of(case):
    flags = [name for name in ("fused", "overlap", "clip", "has_aux") if case[name]]
    return "-".join(
        [case["layout"], case["axis"], case["through"], f"k{case['k']}", case["reduction"], *flags]
    )


def optimizer(clip):
    adam = optax.adamw(1e-2)
    return optax.chain(optax.clip_by_global_norm(0.1), adam) if clip else adam


def with_aux(loss_fn, **operators):
    def fun(params, batch):
        count = jnp.sum(batch["mask"]).astype(jnp.int32)
        rows = layouts.losses(params, batch, **operators)
        return loss_fn(params, batch), {"rows": rows, "tokens": count}

    return fun


@functools.cache
def expected(reduction, clip):
    """Returns losses, first gradients, last parameters and aux of the unsharded run, in float64."""
    loss_fn = layouts.loss_of(reduction)

    def run(params, batch):
        tx = optimizer(clip)

        def step(carry, _):
            params, state = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), (loss, grads)

        aux = with_aux(loss_fn)(params, batch)[1]
        (params, _), (losses, grads) = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
        return losses, jax.tree.map(lambda g: g[0], grads), params, aux

    out = layouts.in_float64(run, layouts.init(), layouts.make_batch())
    if clip:
        assert sum(np.sum(g**2) for g in jax.tree.leaves(out[1])) > 0.1**2  # it clips
    return out


@pytest.mark.parametrize("case", GRID, ids=name_of)
def test_training_equals_the_unsharded_run(case):
    layout = LAYOUTS[case["layout"]]
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh], getattr(AxisType, case["axis"]))
    operators = layout.operators()
    loss_fn = layouts.loss_of(case["reduction"], **operators)
    has_aux = case["has_aux"]
    weigh = {"weight_fn": helpers.count_tokens} if case["reduction"] == "tokens" else {}
    fun = gradaccum.accumulate(
        with_aux(loss_fn, **operators) if has_aux else loss_fn,
        microbatches=case["k"],
        fused=case["fused"],
        overlap=case["overlap"],
        has_aux=has_aux,
        **({"aux_accumulator": AUX} if has_aux else {}),
        **weigh,
        **layout.options(),
    )
    # On Explicit axes a cotangent lies as its primal does.
    method = case["through"] == "method" or (
        case["axis"] == "Explicit" and layout.grads != layout.params
    )
    grad = fun.value_and_grad() if method else jax.value_and_grad(fun, has_aux=has_aux)
    tx, traces = optimizer(case["clip"]), []

    @layouts.jit
    def step(params, state, batch):
        traces.append(1)
        loss, grads = grad(params, batch)
        # ZeRO: each device updates its own part of the parameters, which are then gathered.
        params = layouts.constrain(params, mesh, layout.placed(grads=True))
        updates, state = tx.update(grads, state, params)
        params = layouts.constrain(optax.apply_updates(params, updates), mesh, layout.placed())
        return params, state, loss, grads

    with jax.set_mesh(mesh):
        placed = layouts.place(layouts.init(), mesh, layout.placed())
        state = tx.init(layouts.place(layouts.init(), mesh, layout.placed(grads=True)))
        # optax's own counters are on no mesh yet
        state = jax.tree.map(lambda x: x if x.ndim else layouts.place(x, mesh, P()), state)
        rows = jax.tree.map(lambda x: P(layout.data), layouts.make_batch())
        batch = layouts.place(layouts.make_batch(), mesh, rows)
        params, seen = placed, []
        for _ in range(STEPS):
            params, state, loss, grads = step(params, state, batch)
            layouts.assert_lies(grads, mesh, layout.placed(grads=True))
            seen.append((loss, grads))
        assert len(traces) == 1
        layouts.assert_lies(params, mesh, layout.placed())
        (moments,) = [s for s in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(s)]
        for tree in (moments.mu, moments.nu):
            layouts.assert_lies(tree, mesh, layout.placed(grads=True))

    want = expected(case["reduction"], case["clip"])
    losses = [loss[0] if has_aux else loss for loss, _ in seen]
    got = np.stack(losses), seen[0][1], params
    helpers.assert_close(got, want[:3], within=WITHIN)
    if has_aux:
        aux = seen[0][0][1]
        rows = want[3]["rows"]
        if case["reduction"] == "tokens":  # a microbatch without a token is not evaluated
            size = layouts.B // (case["k"] * layout.devices)
            empty = layouts.make_batch()["mask"].reshape(-1, size).sum(1) == 0
            rows = np.where(np.repeat(empty, size), 0, rows)
        helpers.assert_close(aux["rows"], rows, within=WITHIN)
        assert int(aux["tokens"]) == int(want[3]["tokens"])


def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


def test_the_grid_holds_every_pair():
    names = list(FACTORS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            met = {(c[a], c[b]) for c in GRID}
            assert len(met) == len(FACTORS[a]) * len(FACTORS[b]), (a, b)


# --- Leaves of all kinds in one tree -------------------------------------------------------------

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
