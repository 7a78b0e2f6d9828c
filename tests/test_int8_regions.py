"""`int8_quantize` inside a `jax.shard_map`, typed and not, and over axes of one device."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from int8_model import SMALL, modelled
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import Unreduced, audit
from gradaccum.hooks import int8_quantize

jit = layouts.jit
VMA = pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])


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


@pytest.mark.parametrize("spec", [P(None, "mp"), P("dp", "mp"), P("mp", "dp")], ids=str)
@VMA
def test_a_known_automatic_axis_in_a_shard_map(check_vma, spec):
    """Each shard over it is rounded by itself, and crosses the data axis alone."""
    mesh = layouts.mesh_of({"dp": 4, "mp": 2})
    sums, weights = matrix_rows({"dp": 4})
    fun = gradaccum.unreduced_value_and_grad(
        lambda w, x: jnp.sum(w) * jnp.sum(x), axis_name="dp", grad_specs=(spec,)
    )
    hook = int8_quantize(error_feedback=True, **SMALL)

    def local(w, weight):
        shape = jax.eval_shape(fun, jnp.zeros(w.shape[1:]), weight)[1]
        rows = dataclasses.replace(shape, sum=w, weight=weight, guard=None)
        mean, state = hook(rows, hook.init(rows))
        return mean, state.residual.rows

    data = P(*(a if a == "dp" else None for a in spec))
    region = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=P("dp"),
        out_specs=(data, P("dp")),
        axis_names={"dp"},
        check_vma=check_vma,
    )
    model = P("dp", *(a if a == "mp" else None for a in spec))
    w = jax.device_put(sums["w"], NamedSharding(mesh, model))
    with jax.set_mesh(mesh):
        compiled = jit(region).lower(w, weights).compile()
        got, kept = compiled(w, weights)
    along = list(spec).index("mp")
    cuts = [(d, 4) for d, a in enumerate(spec) if a == "dp"]
    shards = np.split(sums["w"], 2, axis=along + 1)
    want = [modelled(x, weights, cuts, 1 if cuts else 4) for x in shards]
    np.testing.assert_allclose(got, np.concatenate(want, axis=along), rtol=1e-5, atol=1e-6)
    exact = sums["w"].astype(np.float64).sum(0) / weights.sum()
    np.testing.assert_allclose(got + np.asarray(kept).mean(0), exact, rtol=1e-5, atol=1e-5)
    report = audit.collectives(compiled, mesh=mesh)
    assert all(row.axes == ("dp",) for row in report)
    # Half of 384 entries, in 4 chunks of 3 blocks, and one block of scales.
    assert [r.bytes for r in report if r.kind == "all-to-all"] == [4 * (3 + 1) * 16]


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
