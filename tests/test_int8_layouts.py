"""`int8_quantize` on meshes of all kinds: what it sends, and how means and residuals lie."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS

import gradaccum
from gradaccum import Unreduced, audit
from gradaccum.hooks import int8_quantize

jit = layouts.jit
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
VMA = pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
SMALL = {"block_size": 16, "min_size": 16}
FULL = ("bias", "scale")  # too small, of a model whose matrices are not


def is_rows(x):
    return isinstance(x, Unreduced)


def keep_model(dim):
    return "mp" if "mp" in (dim if isinstance(dim, tuple) else (dim,)) else None


def rows_for(layout, mesh, seed=0):
    """Returns random rows of the model's gradients, placed as they would be, with their means."""
    fun = gradaccum.unreduced_value_and_grad(
        layouts.loss_of("tokens", **layout.operators()),
        weight_fn=helpers.count_tokens,
        **layout.options(),
    )
    n = layout.devices
    weights = np.float32([3, 1, 0, 4, 1, 5, 9, 2])[:n]
    params = layouts.place(layouts.init(), mesh, layout.placed())
    shapes = jax.eval_shape(fun, params, layouts.make_batch())[1]
    sums = {
        name: (helpers.normal(seed + i, n, *x.sum.shape[1:])).astype(np.float32)
        for i, (name, x) in enumerate(shapes.items())
    }
    sums = {k: x * weights.reshape(-1, *[1] * (x.ndim - 1)) for k, x in sums.items()}
    placed = {k: P(layout.data, *map(keep_model, s)) for k, s in layout.placed().items()}
    on = layouts.place(sums, mesh, placed)
    weight = jax.device_put(weights, NamedSharding(mesh, P(layout.data)))
    rows = {
        k: dataclasses.replace(x, sum=on[k], weight=weight, guard=None) for k, x in shapes.items()
    }
    return rows, sums, weights


def blocks_of(x, shares, block=SMALL["block_size"]):
    """Rounds a part of a leaf: flat, in equal shares of whole blocks."""
    flat = np.pad(x.ravel(), (0, -x.size % (shares * block))).reshape(-1, block)
    scale = (np.abs(flat).max(1, keepdims=True) / np.float32(127)).astype(np.float32)
    steps = np.round(flat / np.where(scale, scale, np.float32(1)))
    return (steps * scale).ravel()[: x.size].reshape(x.shape).astype(np.float32)


def modelled(sums, weights, cuts, shares):
    """Returns the mean by NumPy: of sums `[n, *shape]` whose mean is cut into (dimension, parts).

    Each part is rounded on every device; what `shares` devices then own in common once more.
    """
    if cuts:
        (dimension, parts), *rest = cuts
        pieces = np.split(sums, parts, axis=dimension + 1)
        pieces = [modelled(x, weights, rest, shares) for x in pieces]
        return np.concatenate(pieces, axis=dimension)
    total = np.sum([blocks_of(x, shares) for x in sums], axis=0, dtype=np.float32)
    return (blocks_of(total, shares) if shares > 1 else total) / weights.sum()


# Layout, the type of its axes, axis_name, the reduction's kinds over the data axes.
BOTH_WAYS, ONE_WAY = {"all-to-all", "all-gather", "all-reduce"}, {"all-to-all", "all-reduce"}
GRID = [
    ("replicated", AUTO, None),
    ("replicated", EXPLICIT, None),
    ("zero", AUTO, None),
    ("fsdp", EXPLICIT, None),
    ("hsdp-replicated", AUTO, None),
    ("hsdp-replicated", AUTO, "replica"),
    ("hsdp", AUTO, None),
    ("hsdp", AUTO, "replica"),
    ("hsdp-zero", EXPLICIT, "replica"),
    ("fsdp-over-both", AUTO, None),
    ("hsdp-gradients-over-both", AUTO, None),
    ("auto-replicated", AUTO, None),
    ("auto-zero", AUTO, None),
    ("auto-fsdp", EXPLICIT, None),
    ("named-fsdp", AUTO, None),
    ("manual-replicated", AUTO, None),
    ("manual-zero", EXPLICIT, None),
    ("manual-fsdp-together", AUTO, None),
    ("typed-fsdp", AUTO, None),
]


@pytest.mark.parametrize(
    ("name", "kind", "axis_name"), GRID, ids=[f"{n}-{k.name}-{a}" for n, k, a in GRID]
)
def test_layouts(name, kind, axis_name):
    """Twice the exact mean is what two steps gave, and what the residuals lack on average."""
    layout = LAYOUTS[name]
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh], kind)
    hook = int8_quantize(error_feedback=True, axis_name=axis_name, **SMALL)
    with jax.set_mesh(mesh):
        rows, sums, weights = rows_for(layout, mesh)
        state = hook.init(rows)
        compiled = jit(hook).lower(rows, state).compile()
        first, state = compiled(rows, state)
        second, after = compiled(rows, state)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    # All of the model is scattered but the two small leaves; unless the layout beside an automatic
    # axis is not known: then it is gathered over that, and cut at the end.
    known = layout.model != "auto" or kind == EXPLICIT
    if known:
        layouts.assert_lies(first, mesh, layout.placed(grads=True))
    exact = {k: x.astype(np.float64).sum(0) / weights.sum() for k, x in sums.items()}
    kept = after.residual.rows
    for k, want in exact.items():
        got, again = np.asarray(first[k]), np.asarray(second[k])
        if k in FULL:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            continue
        most = np.max(np.abs(sums[k].reshape(len(weights), -1)), axis=1).sum() / weights.sum()
        off = np.max(np.abs(got - want))
        assert most / 1e4 < off < 2.1 * most / 254, k
        lacks = np.asarray(kept[k]).mean(0)
        np.testing.assert_allclose(got + again + lacks, 2 * want, rtol=1e-5, atol=1e-5, err_msg=k)
        if "mp" not in mesh.shape and axis_name is None:
            cuts = [
                (d, mesh.shape[a])
                for d, axes in enumerate(layout.placed(grads=True)[k])
                for a in ([axes] if isinstance(axes, str) else axes or ())
            ]
            shares = len(weights) // int(np.prod([n for _, n in cuts], dtype=int))
            by_hand = modelled(sums[k], weights, cuts, shares)
            np.testing.assert_allclose(got, by_hand, rtol=1e-5, atol=1e-6, err_msg=k)
    audit.assert_one_reduction(compiled, axis_name=layout.data, mesh=mesh)
    data = [r for r in audit.collectives(compiled, mesh=mesh) if set(r.axes) & set(layout.data)]
    int8 = [r for r in data if r.dtype == "s8"]
    exchanges = [r for r in int8 if r.kind == "all-to-all"]
    gathers = [r for r in int8 if r.kind == "all-gather"]
    compressed = (axis_name,) if axis_name else layout.data
    assert [r.axes for r in exchanges] == [compressed]
    split = (layout.grads,) if isinstance(layout.grads, str) else layout.grads or ()
    whole = not known or bool(set(compressed) - set(split))
    assert len(gathers) == whole
    assert len(int8) == len(exchanges) + len(gathers)
    full = sum(np.prod(x.shape[1:], dtype=int) for k, x in sums.items() if k in FULL)
    exact_bytes = [r.bytes for r in data if r.kind == "all-reduce"]
    if axis_name is None:
        assert exact_bytes == [4 * (full + len(rows))]  # each leaf has a weight of its own here


# --- Inside an outer shard_map, and axes of one device --------------------------------------------


def matrix_rows(sizes, seed=1):
    n = int(np.prod(list(sizes.values())))
    sums = {"w": helpers.normal(seed, n, 24, 16), "b": helpers.normal(seed + 1, n, 5)}
    return jax.tree.map(lambda x: x.astype(np.float32), sums), np.arange(n, dtype=np.float32)


REGIONS = {
    "replicated": ({"dp": 8}, P(), None),
    "zero": ({"dp": 8}, P("dp"), None),
    "both": ({"r": 2, "d": 4}, P(), None),
    "hsdp": ({"r": 2, "d": 4}, P(None, "d"), "r"),
    "one-device": ({"one": 1, "dp": 8}, P(), None),
    "zero-beside-one": ({"dp": 8, "one": 1}, P("dp"), None),
    "zero-over-one": ({"one": 1, "dp": 8}, P("one"), None),
}


@pytest.mark.parametrize("name", REGIONS)
@VMA
def test_inside_a_shard_map_over_the_data_axes(name, check_vma):
    """Both steps are taken in there, with residuals that never leave, or that do as rows."""
    sizes, spec, axis_name = REGIONS[name]
    mesh = layouts.mesh_of(sizes)
    sums, weights = matrix_rows(sizes)
    data = tuple(sizes)
    fun = gradaccum.unreduced_value_and_grad(
        lambda p, x: jnp.sum(p["w"]) * jnp.sum(p["b"]) * jnp.sum(x),
        axis_name=data,
        grad_specs=({"w": spec, "b": P()},),
    )
    hook = int8_quantize(error_feedback=True, axis_name=axis_name, **SMALL)

    def two(sums, weight):
        params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), sums)
        shapes = jax.eval_shape(fun, params, weight)[1]
        rows = {
            k: dataclasses.replace(x, sum=sums[k], weight=weight, guard=None)
            for k, x in shapes.items()
        }
        state = hook.init(rows)
        first, state = hook(rows, state)
        second, after = hook(rows, state)
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
        return first, second, after.residual.rows["w"]

    out = {"w": spec, "b": P()}
    cut = [None if axis_name in (None, d) else d for d in (*spec, *[None] * (2 - len(spec)))]
    kept_rows = tuple(a for a in data if a not in cut)
    region = jax.shard_map(
        two,
        mesh=mesh,
        in_specs=P(data),
        out_specs=(out, out, P(kept_rows, *cut)),
        check_vma=check_vma,
    )
    compiled = jit(region).lower(sums, weights).compile()
    first, second, kept = compiled(sums, weights)
    exact = jax.tree.map(lambda x: x.astype(np.float64).sum(0) / weights.sum(), sums)
    np.testing.assert_allclose(first["b"], exact["b"], rtol=1e-5, atol=1e-6)
    lacks = np.asarray(kept).mean(0)
    assert np.max(np.abs(lacks)) > 1e-4
    np.testing.assert_allclose(
        first["w"] + second["w"] + lacks, 2 * exact["w"], rtol=1e-5, atol=1e-5
    )
    wire = {r.kind for r in audit.collectives(compiled, mesh=mesh) if r.dtype == "s8"}
    assert wire == {"all-to-all"} | (
        {"all-gather"} if name[:4] != "zero" or "over" in name else set()
    )


@pytest.mark.parametrize("manual", ["dp", "dp-mp"])
@VMA
def test_beside_a_model_axis_in_a_shard_map(check_vma, manual):
    """The model axis is the partitioner's, where leaves are gathered over it, or manual too."""
    mesh = layouts.mesh_of({"dp": 4, "mp": 2})
    sums, weights = matrix_rows({"dp": 4})
    axes = tuple(manual.split("-"))
    enters = P("dp", None, "mp" if "mp" in axes else None)

    def local(w, weight):
        mean, _ = int8_quantize(rounding="nearest", **SMALL)(Unreduced(w, weight, "dp"), ())
        return mean

    region = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(enters, P("dp")),
        out_specs=P(*enters[1:]),
        axis_names=set(axes),
        check_vma=check_vma,
    )
    w = jax.device_put(sums["w"], NamedSharding(mesh, P("dp", None, "mp")))
    with jax.set_mesh(mesh):
        got = np.asarray(jit(region)(w, weights))
    shards = np.split(sums["w"], 2, axis=2) if "mp" in axes else [sums["w"]]
    want = np.concatenate([modelled(x, weights, [], 4) for x in shards], axis=1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_one_device_rounds_nothing():
    sums, weights = matrix_rows({"dp": 1})
    mesh = helpers.data_mesh(1)
    hook = int8_quantize(error_feedback=True, **SMALL)
    with jax.set_mesh(mesh):
        rows = Unreduced(sums["w"], weights + 2, "dp")
        state = hook.init(rows)
        mean, after = jit(hook)(rows, state)
    np.testing.assert_array_equal(mean, sums["w"][0] / 2)
    assert not np.any(after.residual.rows)
    alone = int8_quantize()(Unreduced(sums["w"], weights + 2, None), ())[0]
    np.testing.assert_array_equal(alone, mean)
