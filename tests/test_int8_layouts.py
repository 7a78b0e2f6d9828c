"""`int8_quantize` on meshes of all kinds: what it sends, and how means and residuals lie."""

import dataclasses

import helpers
import jax
import layouts
import numpy as np
import pytest
from int8_model import SMALL, modelled
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS

import gradaccum
from gradaccum import audit
from gradaccum.hooks import int8_quantize

jit = layouts.jit
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FULL = ("bias", "scale")  # too small, of a model whose matrices are not


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


# Layout, the type of its axes, axis_name, the reduction's kinds over the data axes.
BOTH_WAYS, ONE_WAY = {"all-to-all", "all-gather", "all-reduce"}, {"all-to-all", "all-reduce"}
GRID = [
    ("replicated", AUTO, None),
    ("zero", AUTO, None),
    ("fsdp", EXPLICIT, None),
    ("hsdp-replicated", AUTO, "replica"),
    ("hsdp", AUTO, None),
    ("hsdp", AUTO, "replica"),
    ("hsdp-zero", EXPLICIT, "replica"),
    ("hsdp-gradients-over-both", AUTO, None),
    ("auto-replicated", AUTO, None),
    ("auto-zero", AUTO, None),
    ("auto-fsdp", EXPLICIT, None),
    ("named-fsdp", AUTO, None),
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
