"""Where rows lie, what crosses the devices, and when: of `Unreduced`, on meshes of all kinds."""

import contextlib
import functools

import helpers
import jax
import layouts
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS, WITHIN
from optax.microbatching import AccumulationType as Kind
from unreduced_rows import is_rows, jit, kinds_over, pair

import gradaccum
from gradaccum import Unreduced, audit

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])


def sums_of(tree):
    return jax.tree.map(lambda x: x.sum, tree, is_leaf=is_rows)


# --- What is communicated ------------------------------------------------------------------------

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
