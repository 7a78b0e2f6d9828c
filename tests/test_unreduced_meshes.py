"""Where rows lie, what crosses the devices, and when: of `Unreduced`, on meshes of all kinds."""

import contextlib
import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS
from optax.microbatching import AccumulationType as Kind

import gradaccum
from gradaccum import Unreduced, audit
from gradaccum.tensor_parallel import copy_to, reduce_from

jit = layouts.jit
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
VMA = pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
WITHIN = 2e-5  # of the largest entry of a leaf, float32


def is_rows(x):
    return isinstance(x, Unreduced)


def sums_of(tree):
    return jax.tree.map(lambda x: x.sum, tree, is_leaf=is_rows)


def kinds_over(report, axes):
    return [row.kind for row in report if set(row.axes) & set(axes)]


# --- What is communicated ------------------------------------------------------------------------


@functools.cache
def pair():
    """Returns `pair_loss`'s parameters, its batch, and its loss and gradients in float64."""
    params, batch = layouts.init_pair(), layouts.pair_batch()
    return params, batch, layouts.in_float64(jax.value_and_grad(layouts.pair_loss), params, batch)


PAIR_BYTES = 4 * sum(x.size for x in layouts.init_pair().values())


def pair_with_aux(params, batch):
    loss = layouts.pair_loss(params, batch)
    return loss, {"mean": 2 * loss, "sum": 3 * loss, "rows": batch["x"]}


PROGRAMS = {
    "plain": {},
    "k=4": {"microbatches": 4},
    "weighted": {"microbatches": 2, "weight_fn": lambda batch: (batch["y"] > 0).sum()},
    "sum": {"microbatches": 2, "loss_reduction": "sum"},
    "overlap": {"microbatches": 2, "overlap": True},
    "typed": {"microbatches": 2, "check_vma": True},
    "aux": {
        "has_aux": True,
        "aux_accumulator": {"mean": Kind.MEAN, "sum": Kind.SUM, "rows": Kind.CONCAT},
        "weight_fn": lambda batch: (batch["y"] > 0).sum(),
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_communication_until_the_mean_and_then_one(name):
    params, batch, _ = pair()
    mesh, options = helpers.data_mesh(8), PROGRAMS[name]
    loss_fn = pair_with_aux if name == "aux" else layouts.pair_loss
    fun = gradaccum.unreduced_value_and_grad(loss_fn, axis_name="dp", mesh=mesh, **options)
    report = audit.collectives(jax.jit(fun), params, batch, mesh=mesh)
    assert (len(report), report.num_devices) == (0, 8)

    @jax.jit
    def both(params, batch):
        loss, grads = fun(params, batch)
        if name == "aux":
            loss[1].pop("rows")
        return gradaccum.mean((loss, grads))

    compiled = both.lower(params, batch).compile()
    audit.assert_one_reduction(compiled, axis_name="dp", mesh=mesh)
    (row,) = audit.collectives(compiled, mesh=mesh)
    # The loss and one weight for all leaves; with aux, two leaves and their own count.
    scalars = (4, 5) if name == "aux" else (2,)
    assert (row.kind, row.axes, row.executions) == ("all-reduce", ("dp",), 1)
    assert (row.bytes - PAIR_BYTES) / 4 in scalars


def test_the_sum_of_two_calls_has_one_weight_too():
    params, batch, want = pair()
    mesh = helpers.data_mesh(8)
    fun = gradaccum.unreduced_value_and_grad(layouts.pair_loss, mesh=mesh)

    @jax.jit
    def two(params, batch):
        first, second = (jax.tree.map(lambda x, s=s: x[s], batch) for s in (np.s_[:8], np.s_[8:]))
        return gradaccum.mean(gradaccum.add(fun(params, first), fun(params, second)))

    assert_close(two(params, batch), want, within=WITHIN)
    reductions = [r for r in audit.collectives(two, params, batch, mesh=mesh)
                  if r.kind == "all-reduce"]  # fmt: skip
    assert [row.bytes for row in reductions] == [PAIR_BYTES + 2 * 4]
    # What a jit returned has arrays of its own in each leaf: 4 bytes for each.
    (row,) = audit.collectives(jax.jit(gradaccum.mean), jit(fun)(params, batch), mesh=mesh)
    assert row.bytes <= PAIR_BYTES + (1 + 4) * 4


# --- How it lies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_name", ["dp", ("r", "d"), ("d", "r")], ids=str)
@KINDS
def test_each_device_holds_its_own_row(kind, axis_name):
    params, batch, want = pair()
    sizes = {"dp": 8} if axis_name == "dp" else {"r": 2, "d": 4}
    mesh = layouts.mesh_of(sizes, kind)
    fun = gradaccum.unreduced_value_and_grad(layouts.pair_loss, axis_name=axis_name)
    with jax.set_mesh(mesh):
        tree = jit(fun)(params, layouts.place(batch, mesh, dict.fromkeys(batch, P(axis_name))))
        got = gradaccum.mean(tree)
    for x in jax.tree.leaves(tree, is_leaf=is_rows):
        assert x.axis_name == axis_name
        for part in (x.sum, x.weight):
            assert part.sharding.is_equivalent_to(NamedSharding(mesh, P(axis_name)), part.ndim)
            shards = {s.data.shape for s in part.addressable_shards}
            assert shards == {(1, *part.shape[1:])}
    # Row d is of the d-th part of the batch, in the order of its sharding.
    one = {n: x[4:8] for n, x in batch.items()}
    own = jax.tree.map(lambda x: np.asarray(x.sum)[1] / 4, tree, is_leaf=is_rows)
    assert_close(own, layouts.in_float64(jax.value_and_grad(layouts.pair_loss), params, one))
    assert_close(got, want, within=WITHIN)


# "replicated" is the rest of this file's.
GRID = [
    *((n, AUTO) for n in ("zero", "fsdp", "fsdp-over-both", "hsdp-gradients-over-both")),
    *((n, AUTO) for n in ("auto-replicated", "auto-zero", "auto-fsdp", "named-fsdp")),
    *((n, AUTO) for n in ("manual-zero", "typed-fsdp", "manual-fsdp-together")),
    *((n, EXPLICIT) for n in ("hsdp-zero", "auto-fsdp", "manual-fsdp")),
]


@functools.cache
def reference():
    loss_fn = jax.value_and_grad(layouts.loss_of("tokens"))
    return layouts.in_float64(loss_fn, layouts.init(), layouts.make_batch())


@pytest.mark.parametrize(
    ("name", "kind"), GRID, ids=[f"{n}-{k.name}" for n, k in GRID]
)  # fmt: skip
def test_sharded_parameters(name, kind):
    """A parameter is gathered at most once; the mean lies as `grad_specs` say; rows are split over
    the model axis as the parameters are."""
    layout = LAYOUTS[name]
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh], kind)
    fun = gradaccum.unreduced_value_and_grad(
        layouts.loss_of("tokens", **layout.operators()),
        microbatches=2,
        weight_fn=helpers.count_tokens,
        **layout.options(),
    )
    with jax.set_mesh(mesh):
        params = layouts.place(layouts.init(), mesh, layout.placed())
        batch = layouts.make_batch()
        batch = layouts.place(batch, mesh, dict.fromkeys(batch, P(layout.data)))
        compiled = jit(fun).lower(params, batch).compile()
        tree = compiled(params, batch)
        mean = jit(gradaccum.mean).lower(tree).compile()
        got = mean(tree)
    audit.assert_one_reduction(mean, axis_name=layout.data, mesh=mesh)
    kinds = set(kinds_over(audit.collectives(mean, mesh=mesh), layout.data))
    layouts.assert_lies(got[1], mesh, layout.placed(grads=True))
    assert_close(got, reference(), within=WITHIN)
    known = not name.startswith("auto") or kind == EXPLICIT  # how it lies on the model axis
    scatters = layout.grads and known
    assert kinds == ({"all-reduce", "reduce-scatter"} if scatters else {"all-reduce"})

    report = audit.collectives(compiled, mesh=mesh)
    gathers = kinds_over(report, layout.data)
    split = 4 if layout.params else 0  # leaves; over two axes, twice
    assert gathers == ["all-gather"] * split * (2 if isinstance(layout.params, tuple) else 1)
    assert all(row.executions == 1 for row in report if set(row.axes) & set(layout.data))
    only_model = lambda s: P(layout.data, *map(keep_model, s))  # noqa: E731
    layouts.assert_lies(
        sums_of(tree[1]), mesh, {n: only_model(s) for n, s in layout.placed().items()}
    )


def keep_model(dim):
    return "mp" if "mp" in (dim if isinstance(dim, tuple) else (dim,)) else None


@pytest.mark.parametrize("made", ["argument", "context", "host"])
@pytest.mark.parametrize("reduced", ["argument", "context"])
@KINDS
def test_the_mesh_of_the_mean(kind, made, reduced):
    """Given where the value is made, or in context; of one or the other, or of both."""
    params, batch, want = pair()
    mesh = layouts.mesh_of({"dp": 8}, kind)
    given = {} if made == "context" else {"mesh": mesh}
    fun = gradaccum.unreduced_value_and_grad(layouts.pair_loss, axis_name="dp", **given)
    with jax.set_mesh(mesh) if made == "context" else contextlib.nullcontext():
        if made != "host":
            params = layouts.place(params, mesh, dict.fromkeys(params, P()))
        tree = jit(fun)(params, batch)
        tree = gradaccum.add(tree, tree)
    context = jax.set_mesh(mesh) if reduced == "context" else contextlib.nullcontext()
    with context:
        for mean in (gradaccum.mean, jax.jit(gradaccum.mean)):
            if made == "context" and reduced == "argument" and mean is not gradaccum.mean:
                continue  # on tracers nothing says which mesh
            assert_close(mean(tree), want, within=WITHIN)


@pytest.mark.parametrize("mesh", ["one", "none"])
def test_one_device(mesh):
    params, batch, want = pair()
    given = {"mesh": helpers.data_mesh(1), "axis_name": "dp"} if mesh == "one" else {}
    fun = gradaccum.unreduced_value_and_grad(
        layouts.pair_loss, microbatches=4, **({"axis_name": None} | given)
    )
    both = jit(lambda params, batch: gradaccum.mean(fun(params, batch)))
    assert_close(both(params, batch), want, within=WITHIN)
    loss, _ = fun(params, batch)
    assert (loss.sum.shape, float(loss.weight[0])) == ((1,), layouts.B)
    assert "in 1 rows over " + ("'dp'" if mesh == "one" else "no axis") in repr(loss)
    assert "psum" not in str(jax.make_jaxpr(fun)(params, batch))


@KINDS
def test_rows_made_by_hand_stay_split_over_a_model_axis(kind):
    mesh = layouts.mesh_of({"dp": 4, "mp": 2}, kind)
    sums = np.arange(32, dtype=np.float32).reshape(4, 8)
    with jax.set_mesh(mesh):
        rows = Unreduced(layouts.place(sums, mesh, P("dp", "mp")), np.full(4, 2, np.float32), "dp")
        got = jit(gradaccum.mean)(rows)
    layouts.assert_lies(got, mesh, P("mp"))
    assert_close(got, sums.sum(0) / 8)


# --- Inside an outer shard_map -------------------------------------------------------------------

SPLIT = {"up": P("dp"), "down": P(None, "dp"), "bias": P()}
WHOLE = dict.fromkeys(SPLIT, P())
# how the parameters enter, how the gradients lie, options
REGIONS = {
    "plain": (WHOLE, WHOLE, {}),
    "fsdp": (SPLIT, SPLIT, {"in_specs": (SPLIT,)}),
    "zero": (WHOLE, SPLIT, {"grad_specs": (SPLIT,)}),
}


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [("plain", False), ("plain", True), ("fsdp", False), ("fsdp", True), ("zero", False)],
)
def test_inside_a_shard_map_over_the_data_axis(name, check_vma):
    """The mean there, or of what it returned; or there, of what was made outside or returned."""
    params, batch, want = pair()
    mesh = helpers.data_mesh(8)
    places, lies, options = REGIONS[name]
    make = functools.partial(
        gradaccum.unreduced_value_and_grad,
        layouts.pair_loss, axis_name="dp", microbatches=2, **options,
    )  # fmt: skip
    fun, shapes = make(), []
    region = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    entered = {"in_specs": (places, P("dp"))}

    def row(params, batch):
        tree = fun(params, batch)
        shapes.extend(x.sum.shape for x in jax.tree.leaves(tree, is_leaf=is_rows))
        return gradaccum.add(tree, tree)

    inside = region(lambda *args: gradaccum.mean(row(*args)), **entered, out_specs=(P(), lies))
    placed = layouts.place((params, batch), mesh, (places, dict.fromkeys(batch, P("dp"))))
    compiled = jit(inside).lower(*placed).compile()
    got = compiled(*placed)
    assert_close(got, want, within=WITHIN)
    layouts.assert_lies(got[1], mesh, lies)
    assert shapes == [(1,), (1, 8), (1, 16, 8), (1, 8, 16)]
    kinds = {"all-reduce"} if lies is WHOLE else {"all-reduce", "reduce-scatter"}
    report = audit.collectives(compiled, mesh=mesh)
    assert set(kinds_over(report, ["dp"])) - {"all-gather"} == kinds

    returned = jit(region(row, **entered, out_specs=P("dp")))(params, batch)
    with jax.set_mesh(mesh):
        assert_close(gradaccum.mean(returned), want, within=WITHIN)

    taken = region(gradaccum.mean, in_specs=P("dp"), out_specs=(P(), lies))
    for tree in (make(mesh=mesh)(params, batch), returned):
        assert_close(jax.jit(taken)(tree), want, within=WITHIN)


@pytest.mark.parametrize("manual", ["mp", "dp", "dp-mp"])
@VMA
def test_beside_a_model_axis_in_a_shard_map(check_vma, manual):
    """Either axis, or both, are manual; the model axis is then a matter of the loss."""
    params, batch, want = pair()
    mesh = layouts.mesh_of({"dp": 4, "mp": 2})
    places = {"up": P(None, "mp"), "down": P("mp"), "bias": P()}
    axes = set(manual.split("-"))
    by_hand = {"f": lambda x: copy_to(x, "mp"), "g": lambda x: reduce_from(x, "mp")}
    typed = {"g": lambda x: jax.lax.psum(x, "mp")}
    operators = (typed if check_vma else by_hand) if "mp" in axes else {}
    fun = gradaccum.unreduced_value_and_grad(
        functools.partial(layouts.pair_loss, **operators), axis_name="dp", microbatches=2
    )
    named = lambda s: P(*(d if d in axes else None for d in s))  # noqa: E731
    enters = {n: named(s) for n, s in places.items()}
    region = jax.shard_map(
        lambda params, batch: gradaccum.mean(fun(params, batch)),
        mesh=mesh,
        in_specs=(enters, named(P("dp"))),
        out_specs=(P(), enters),
        axis_names=axes,
        check_vma=check_vma,
    )
    got = jit(region)(layouts.place(params, mesh, places), batch)
    assert_close(got, want, within=WITHIN)
    layouts.assert_lies(got[1], mesh, places)


def test_whole_rows_inside_a_shard_map_are_refused():
    mesh = helpers.data_mesh(8)
    rows = Unreduced(np.ones(8, np.float32), np.ones(8, np.float32), "dp")
    region = jax.shard_map(gradaccum.mean, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    message = r"an Unreduced of 8 rows; inside a shard_map over the data axes each device has 1"
    with pytest.raises(ValueError, match=message):
        jax.jit(region)(rows)


@VMA
def test_a_row_made_by_hand_inside_a_shard_map(check_vma):
    mesh = helpers.data_mesh(8)

    def local(x):
        grad = jax.grad(lambda w: jnp.sum(w * x))(jax.lax.axis_index("dp") * 1.0)
        return gradaccum.mean(Unreduced(grad[None], jnp.ones(1), "dp"))

    region = jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P(), check_vma=check_vma)
    assert float(jax.jit(region)(np.arange(16.0, dtype=np.float32))) == 15
