"""`powersgd` on meshes of all kinds: whole matrices everywhere, what it sends, how it lies."""

import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import powersgd_reference as reference
import pytest
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS

import gradaccum
from gradaccum import Unreduced, audit
from gradaccum.hooks import powersgd

jit = layouts.jit
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
VMA = pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
RANK = 2
OPTIONS = {"rank": RANK, "min_compression_rate": 1}
FULL = ("bias",)
LEAVES = ("bias", "down", "up")  # of the model; a leaf more is seconds of compilation


def keep_model(dim):
    return "mp" if "mp" in (dim if isinstance(dim, tuple) else (dim,)) else None


def lies(layout):
    return {k: layout.placed(grads=True)[k] for k in LEAVES}


def rows_for(layout, mesh, seed=0):
    """Returns random rows of the model's gradients, placed as they would be, and their sums."""
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
        k: reference.by_weight(helpers.normal(seed + i, n, *x.sum.shape[1:]), weights)
        for i, (k, x) in enumerate(shapes.items())
        if k in LEAVES
    }
    placed = {k: P(layout.data, *map(keep_model, layout.placed()[k])) for k in LEAVES}
    on = layouts.place(sums, mesh, placed)
    weight = jax.device_put(weights, NamedSharding(mesh, P(layout.data)))
    rows = {k: dataclasses.replace(shapes[k], sum=on[k], weight=weight, guard=None) for k in LEAVES}
    return rows, sums, weights


def modelled(sums, weights, q, steps):
    """Returns the means of steps on the same rows, by NumPy; they depend on the exact mean alone.

    What the residuals hold is, on average, the exact mean less what was sent: whatever the devices.
    """
    mean = sums.astype(np.float64).sum(0, keepdims=True) / weights.sum()
    residual, one, means = np.zeros_like(mean), np.ones(1), []
    for _ in range(steps):
        got, residual, q = reference.step(mean, one, residual, q)
        means.append(got)
    return means, residual[0], q


GRID = [
    ("replicated", AUTO, None),
    ("fsdp", EXPLICIT, None),
    ("hsdp-replicated", AUTO, "replica"),
    ("hsdp", AUTO, "replica"),
    ("hsdp-gradients-over-both", AUTO, None),
    ("auto-zero", AUTO, None),
    ("named-fsdp", AUTO, None),
    ("manual-zero", EXPLICIT, None),
    ("manual-fsdp-together", AUTO, None),
]


@pytest.mark.parametrize(
    ("name", "kind", "axis_name"), GRID, ids=[f"{n}-{k.name}-{a}" for n, k, a in GRID]
)
def test_layouts(name, kind, axis_name):
    """Wherever a matrix lies, it is the whole of it that is compressed."""
    layout = LAYOUTS[name]
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh], kind)
    hook = powersgd(axis_name=axis_name, **OPTIONS)
    with jax.set_mesh(mesh):
        rows, sums, weights = rows_for(layout, mesh)
        state = hook.init(rows)
        step = jit(hook).lower(rows, state).compile()
        first, after = step(rows, state)
        placed = jax.tree.map(lambda x: x.sharding, state)  # XLA may split factors over mp
        second, last = step(rows, jax.device_put(after, placed))
    assert jax.tree.map(jax.typeof, last) == jax.tree.map(jax.typeof, state)
    if layout.model != "auto" or kind == EXPLICIT:
        layouts.assert_lies(second, mesh, lies(layout))
    for k, x in sums.items():
        if k in FULL:
            np.testing.assert_allclose(first[k], reference.exact(x, weights), rtol=1e-5, atol=1e-6)
            assert (state.q[k], state.residual.rows[k]) == (None, None)
            continue
        means, missing, q = modelled(x, weights, np.asarray(state.q[k]), 2)
        assert reference.off(means[0], reference.exact(x, weights)) > 0.05
        assert_close([np.asarray(first[k]), np.asarray(second[k])], means, within=1e-4)
        assert_close(np.asarray(last.q[k]), q, within=1e-3)
        # Rows along the compressed axes, of sums over the others: so their weights are summed too.
        kept = np.asarray(last.residual.rows[k], np.float64)
        r = 2 if axis_name else layout.devices
        assert kept.shape == (r, *x.shape[1:])
        held = np.einsum("r,r...->...", weights.reshape(r, -1).sum(1), kept) / weights.sum()
        assert_close(held, missing, within=1e-4)


@VMA
def test_a_stack_that_is_split_by_layers(check_vma):
    """Each fast device has matrices of its own; the factors of all are everywhere the same."""
    mesh = layouts.mesh_of({"replica": 2, "fsdp": 4})
    fun = gradaccum.unreduced_value_and_grad(
        lambda w, x: jnp.sum(w * jnp.mean(x, 0)),
        axis_name=("replica", "fsdp"),
        grad_specs=(P("fsdp"),),
        check_vma=check_vma,
    )
    hook = powersgd(axis_name="replica", **OPTIONS)
    x = helpers.normal(3, 8, 4, 12, 8).astype(np.float32)
    with jax.set_mesh(mesh):
        _, rows = jit(fun)(jnp.zeros((4, 12, 8)), x)
        state = hook.init(rows)
        means = [jit(hook)(rows, state)]
        means.append(jit(hook)(rows, means[0][1]))
    want, _, q = modelled(x, np.ones(8), np.asarray(state.q), 2)
    assert_close([np.asarray(mean) for mean, _ in means], want, within=1e-4)
    layouts.assert_lies(means[1][0], mesh, P("fsdp"))
    assert_close(np.asarray(means[1][1].q), q, within=1e-3)


def test_of_hsdp_only_parts_of_factors_cross_the_slow_axis():
    layout = LAYOUTS["hsdp"]
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh])
    with jax.set_mesh(mesh):
        rows, sums, _ = rows_for(layout, mesh)
        bytes_over = {}
        for hook in (powersgd(axis_name="replica", **OPTIONS), gradaccum.hooks.allreduce()):
            state = hook.init(rows)
            report = audit.collectives(jit(hook), rows, state, mesh=mesh)
            slow = [row for row in report if row.axes == ("replica",)]
            assert len(slow) == (2 if type(hook) is powersgd else len(slow))
            assert all(row.kind == "all-reduce" for row in slow)
            assert not any(set(row.axes) == {"replica", "fsdp"} for row in report if row.bytes > 64)
            bytes_over[type(hook).__name__] = sum(row.bytes for row in slow)
    # Of [n, m] split along n: the left factors' own rows, and all of the right ones.
    factors = 0
    for k, x in sums.items():
        if k not in FULL:
            *lead, n, m = x.shape[1:]
            rows_split = lies(layout)[k][x.ndim - 3] == "fsdp"
            n, m = (n // 4, m) if rows_split else (n, m // 4)
            factors += 4 * RANK * int(np.prod(lead)) * (n + m)
    small = 4 * (8 + 3)  # what is exact, and each leaf's own weight, as a jit's argument has it
    assert bytes_over["powersgd"] <= factors + small


# --- Inside a shard_map of one's own -------------------------------------------------------------


@functools.cache
def manual_rows():
    weights = np.float32([3, 1, 0, 4])
    rows = {
        "w": reference.by_weight(helpers.normal(0, 4, 24, 20), weights),
        "b": reference.by_weight(helpers.normal(1, 4, 20), weights),
    }
    return rows, weights


@VMA
def test_in_a_shard_map(check_vma):
    """Over the data axis, and a model axis that splits `w`: each shard is a matrix of its own."""
    mesh = layouts.mesh_of({"dp": 4, "mp": 2})
    rows, weights = manual_rows()
    hook = powersgd(rank=RANK, start_step=1)
    by = {"w": P("dp", None, "mp"), "b": P("dp")}
    kept = gradaccum.hooks.Residual({"w": by["w"], "b": None})
    states = type(hook.init({}))(steps=P(), q={"w": P("mp"), "b": None}, residual=kept)
    share = lambda rows, w: jax.tree.map(lambda x: Unreduced(x, w, axis_name="dp"), rows)  # noqa: E731
    on = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    init = on(lambda r, w: hook.init(share(r, w)), in_specs=(by, P("dp")), out_specs=states)
    step = on(
        lambda r, w, s: hook(share(r, w), s),
        in_specs=(by, P("dp"), states),
        out_specs=({"w": P(None, "mp"), "b": P()}, states),
    )
    state = jit(init)(rows, weights)
    assert state.q["w"].shape == (20, RANK)  # two of [10, r]
    q = np.asarray(state.q["w"])
    step = jit(step)
    mean, state = step(rows, weights, state)
    assert_close(mean, {k: reference.exact(x, weights) for k, x in rows.items()}, within=1e-5)
    means = [step(rows, weights, state)]
    means.append(step(rows, weights, means[0][1]))
    for part in range(2):
        columns = np.s_[10 * part : 10 * part + 10]
        want, _, after = modelled(rows["w"][:, :, columns], weights, q[columns], 2)
        got = [np.asarray(mean["w"])[:, columns] for mean, _ in means]
        assert_close(got, want, within=1e-4)
        assert_close(np.asarray(means[1][1].q["w"])[columns], after, within=1e-3)


@VMA
def test_hsdp_in_a_shard_map(check_vma):
    """Rows that are scattered over the fast axis by the hook itself; the factors are of all."""
    layout = LAYOUTS["hsdp-zero"]
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh])
    hook = powersgd(axis_name="replica", **OPTIONS)
    with jax.set_mesh(mesh):
        rows, sums, weights = rows_for(layout, mesh)
    awaited = {k: x.awaited for k, x in rows.items()}

    def both(sums, weights):
        tree = {k: Unreduced(x, weights, layout.data, awaited[k]) for k, x in sums.items()}
        state = hook.init(tree)
        first, state = hook(tree, state)
        second, state = hook(tree, state)
        return first, second, state.q

    placed = lies(layout)
    q = {k: None if k in FULL else P() for k in sums}
    on = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=(P(layout.data), P(layout.data)),
        out_specs=(placed, placed, q),
        check_vma=check_vma,
    )
    first, second, q = jit(on)(sums, weights)
    with jax.set_mesh(mesh):
        start = hook.init(rows).q
    for k, x in sums.items():
        if k in FULL:
            np.testing.assert_allclose(first[k], reference.exact(x, weights), rtol=1e-5, atol=1e-6)
            continue
        means, _, factors = modelled(x, weights, np.asarray(start[k]), 2)
        assert_close([np.asarray(first[k]), np.asarray(second[k])], means, within=1e-4)
        assert_close(np.asarray(q[k]), factors, within=1e-3)


def test_a_gradient_split_over_the_compressed_axis_beside_others_is_refused():
    layout = LAYOUTS["hsdp-gradients-over-both"]
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh])
    with jax.set_mesh(mesh):
        rows, _, _ = rows_for(layout, mesh)
        hook = powersgd(axis_name="replica", **OPTIONS)
        with pytest.raises(
            ValueError, match=r"powersgd: axis_name=.*'replica'.*leave axis_name out"
        ):
            hook(rows, hook.init(rows))
