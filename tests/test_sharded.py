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
from layouts import LAYOUTS, WITHIN
from optax.microbatching import AccumulationType as Kind

import gradaccum

STEPS = 3

# Of these each leaf is in `ORDERS` or `TOGETHER` of test_sharded_leaves.py.
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
