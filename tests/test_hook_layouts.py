"""Every communication hook on every layout of parameters and gradients, both ways it is called."""

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import AxisType

import gradaccum
from gradaccum import hooks

# What a hook may be off by, of the largest entry of a leaf: its rounding, over 8 rows.
HOOKS = {
    "allreduce": (hooks.allreduce(), 1e-5),
    "bf16": (hooks.bf16_compress(), 2e-2),
    "fp16": (hooks.fp16_compress(), 3e-3),
}
SLOW = {"fp16": (hooks.fp16_compress(axis_name="replica"), 3e-3)}
ODD = tuple(layouts.LAYOUTS)[::2]
EVERYWHERE = ("replicated", "auto-replicated")
CASES = [
    pytest.param(layout, hook, within, decorated, id=f"{name}-{called}-{way}")
    for name, layout in layouts.LAYOUTS.items()
    for called, (hook, within) in HOOKS.items()
    for way, decorated in (("decorated", True), ("MultiSteps", False))
    if name in EVERYWHERE or (called == "fp16" and decorated == (name in ODD))
] + [
    pytest.param(layouts.LAYOUTS[name], hook, within, decorated, id=f"{name}-slow-{called}-{way}")
    for name in ("hsdp-replicated", "hsdp")
    for called, (hook, within) in SLOW.items()
    for way, decorated in (("decorated", True), ("MultiSteps", False))
]


def setup(layout, kind=AxisType.Auto):
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh], kind)
    params = layouts.place(layouts.init(), mesh, layout.placed())
    loss_fn = layouts.loss_of("tokens", **layout.operators())
    return mesh, params, loss_fn, {"weight_fn": lambda b: b["mask"].sum(), **layout.options()}


def reference():
    loss_fn = layouts.loss_of("tokens")
    return layouts.in_float64(jax.grad(loss_fn), layouts.init(), layouts.make_batch())


def gradients(layout, hook, decorated, kind=AxisType.Auto):
    """Returns the gradients, of one call or of a window of two, and the compiled step's audit."""
    mesh, params, loss_fn, options = setup(layout, kind)
    batch = layouts.make_batch()
    with jax.set_mesh(mesh):
        if decorated:
            fun = gradaccum.accumulate(loss_fn, microbatches=2, comm_hook=hook, **options)
            step = layouts.jit(fun.value_and_grad()).lower(params, batch).compile()
            return step(params, batch)[1], step, mesh
        fun = gradaccum.unreduced_value_and_grad(loss_fn, **options)
        tx = gradaccum.MultiSteps(
            optax.scale(1.0), 2, axis_name=options["axis_name"], mesh=mesh, comm_hook=hook
        )
        placed = layouts.place(layouts.init(), mesh, layout.placed(grads=True))
        state = tx.init(placed)

        @layouts.jit
        def step(params, state, batch):
            _, grads = fun(params, batch)
            return tx.update(grads, state, params)

        size = batch["x"].shape[0] // 2
        # Halves that hold each device's rows of both calls, as one batch of two microbatches does.
        rows = np.arange(2 * size).reshape(layout.devices, 2, -1)
        for half in range(2):
            chosen = rows[:, half].reshape(-1)
            part = {name: x[chosen] for name, x in batch.items()}
            if half == 0:  # one program serves both calls: the state's types do not change
                step = step.lower(params, state, part).compile()
            updates, state = step(params, state, part)
        return updates, step, mesh


@pytest.mark.parametrize(("layout", "hook", "within", "decorated"), CASES)
def test_the_mean_is_the_full_batchs(layout, hook, within, decorated):
    got, compiled, mesh = gradients(layout, hook, decorated)
    assert_close(got, reference(), within=within)
    layouts.assert_lies(got, mesh, layout.placed(grads=True))
    gradaccum.audit.assert_one_reduction(
        compiled, axis_name=layout.data, mesh=mesh, conditional=not decorated
    )


@pytest.mark.parametrize("decorated", [True, False], ids=["decorated", "MultiSteps"])
@pytest.mark.parametrize("name", ["fsdp", "hsdp", "named-fsdp", "manual-fsdp"])
def test_explicit_axes(name, decorated):
    got, _, mesh = gradients(
        layouts.LAYOUTS[name], hooks.fp16_compress(), decorated, AxisType.Explicit
    )
    assert_close(got, reference(), within=3e-3)
    layouts.assert_lies(got, mesh, layouts.LAYOUTS[name].placed(grads=True))
    assert jnp.isfinite(got["scale"])
