"""`gradient_noise_scale` on meshes: sharded means, model axes, manual regions, mixed trees."""

import functools
import operator

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from helpers import data_mesh
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layouts import jit
from test_noise_scale import assert_measured, unreduced

import gradaccum
from gradaccum import hooks
from gradaccum._mesh import is_typed
from gradaccum.hooks._noise_scale import gradient_noise_scale

N = 8
NORMAL = helpers.normal


@functools.cache
def device_gradients(devices):
    """Returns each device's mean gradient over its tokens, flat, float64, and their number."""
    batch = layouts.make_batch()
    rows, weights = [], []
    for d in np.split(np.arange(layouts.B), devices):
        part = {name: x[d] for name, x in batch.items()}
        weights.append(part["mask"].sum())
        if weights[-1]:
            grad = layouts.in_float64(jax.grad(layouts.loss_of("tokens")), layouts.init(), part)
            rows.append(np.concatenate([g.ravel() for g in jax.tree.leaves(grad)]))
        else:
            rows.append(np.zeros(1))
    return rows, weights


def window_of_two(layout, hook, kind=AxisType.Auto):
    """Returns the updates and the state after a window, the compiled step and the mesh."""
    mesh = layouts.mesh_of(layouts.MESHES[layout.mesh], kind)
    params = layouts.place(layouts.init(), mesh, layout.placed())
    options = {"weight_fn": lambda b: b["mask"].sum(), **layout.options()}
    loss_fn = layouts.loss_of("tokens", **layout.operators())
    batch = layouts.make_batch()
    with jax.set_mesh(mesh):
        fun = gradaccum.unreduced_value_and_grad(loss_fn, **options)
        tx = gradaccum.MultiSteps(
            optax.scale(1.0), 2, axis_name=options["axis_name"], comm_hook=hook
        )
        state = tx.init(layouts.place(layouts.init(), mesh, layout.placed(grads=True)))

        @jit
        def step(params, state, batch):
            return tx.update(fun(params, batch)[1], state, params)

        rows = np.arange(layouts.B).reshape(layout.devices, 2, -1)
        for half in range(2):
            part = {name: x[rows[:, half].reshape(-1)] for name, x in batch.items()}
            if half == 0:  # one program serves both calls
                step = step.lower(params, state, part).compile()
            updates, state = step(params, state, part)
    return updates, state, step, mesh


CASES = [
    ("replicated", AxisType.Auto),
    ("fsdp", AxisType.Auto),
    ("hsdp", AxisType.Auto),
    ("fsdp-over-both", AxisType.Auto),
    ("auto-fsdp", AxisType.Auto),
    ("manual-fsdp", AxisType.Auto),
    ("fsdp", AxisType.Explicit),
    ("named-fsdp", AxisType.Explicit),
]


@pytest.mark.parametrize(
    ("name", "kind"), CASES, ids=[f"{name}-{kind.name.lower()}" for name, kind in CASES]
)
def test_norms_are_of_whole_gradients(name, kind):
    layout = layouts.LAYOUTS[name]
    updates, state, compiled, mesh = window_of_two(layout, gradient_noise_scale(), kind)
    assert_measured(state.comm_state, *device_gradients(layout.devices))
    layouts.assert_lies(updates, mesh, layout.placed(grads=True))
    gradaccum.audit.assert_one_reduction(
        compiled, axis_name=layout.data, mesh=mesh, conditional=True
    )
    if name in ("replicated", "fsdp", "auto-fsdp") and kind is AxisType.Auto:
        *_, plain, _ = window_of_two(layout, hooks.allreduce())
        want, got = (gradaccum.audit.collectives(x, mesh=mesh).totals for x in (plain, compiled))
        more = {a: got[a].bytes - want[a].bytes for a in got}
        # Beside the scalars in the mean, a scalar of each leaf that is split: four, or the two
        # matrices of a model axis, which are so twice, as rows and as means.
        assert more == {
            "replicated": {"dp": 12},
            "fsdp": {"dp": 28},
            "auto-fsdp": {"fsdp": 28, "mp": 16},
        }.get(name)


def test_a_lossy_hook_keeps_its_state_and_the_estimate_is_near():
    layout = layouts.LAYOUTS["replicated"]
    inner = hooks.int8_quantize(error_feedback=True, min_size=16, block_size=8)
    updates, state, *_ = window_of_two(layout, gradient_noise_scale(inner))
    alone, only, *_ = window_of_two(layout, inner)
    # Bitwise the same are hooks alone (test_noise_scale); XLA may round a whole step otherwise.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, updates, alone)
    got, want = jax.tree.leaves(state.comm_state.inner), jax.tree.leaves(only.comm_state)
    jax.tree.map(close, got, want)
    assert any(np.any(x) for x in jax.tree.leaves(state.comm_state.inner.residual))
    assert_measured(state.comm_state, *device_gradients(N), within=0.05)


def mixed_rows():
    """Returns leaves that all weigh in the norms, whose squares overflow float16; and them flat."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: 300 * rng.normal(1, 0.5, (N, *shape))  # noqa: E731
    rows = {
        "f32": normal(3, 4).astype(np.float32),
        "bf16": jnp.asarray(normal(5), jnp.bfloat16),
        "f16": normal(2).astype(np.float16),
        "complex": (normal(6) + 2j * normal(6)).astype(np.complex64),
        "scalar": normal().astype(np.float32),
        "empty": np.zeros((N, 0), np.float32),
        "none": None,
    }
    flat = [np.asarray(x).astype(complex).reshape(N, -1) for x in jax.tree.leaves(rows)]
    return rows, np.concatenate(flat, axis=1)


@pytest.mark.parametrize("axes", ["dp", ("a", "b")], ids=["one-axis", "two-axes"])
def test_mixed_trees(axes):
    rows, flat = mixed_rows()
    weights = [1.0, 2, 1, 2, 1, 2, 4, 0]
    mesh = data_mesh(N) if axes == "dp" else jax.make_mesh((4, 2), axes)
    hook = gradient_noise_scale()
    with jax.set_mesh(mesh):
        given = unreduced(rows, weights, axes)
        # Integers have no mean of their dtype, sums no mean at all: neither is a gradient.
        count = gradaccum.Unreduced(jnp.full((N,), 1000), given["f32"].weight, axes)
        given["counts"] = count
        state = hook.init(given)
        mean, state = hook(given, state)  # outside jit, too
    assert_measured(state, flat, weights, within=5e-3)  # a bfloat16 mean is rounded
    assert mean["none"] is None
    assert float(mean["counts"]) == pytest.approx(N * 1000 / sum(weights))


def test_a_tree_without_gradients_measures_nothing():
    hook = gradient_noise_scale()
    with jax.set_mesh(data_mesh(N)):
        for given in ({}, {"n": gradaccum.Unreduced(jnp.ones(N, int), jnp.ones(N), "dp")}):
            state = hook.init(given)
            mean, after = hook(given, state)
            assert jax.tree.structure(mean) == jax.tree.structure(dict.fromkeys(given, 0))
            assert after.measurements == 0


def test_one_device_runs_and_measures_nothing():
    hook = gradient_noise_scale()
    rows = gradaccum.Unreduced(jnp.ones((1, 3)), jnp.array([4.0]), axis_name=None)
    mean, state = hook(rows, hook.init(rows))
    assert mean.tolist() == [0.25] * 3
    assert np.isnan(state.noise_scale)


# --- Inside a shard_map ---------------------------------------------------------------------------


def pair_gradients():
    """Returns each of four devices' gradient of two calls, flat, in float64."""
    batch, rows = layouts.pair_batch(), []
    for d in np.split(np.arange(layouts.B), 4):
        part = {name: x[d] for name, x in batch.items()}
        grad = layouts.in_float64(jax.grad(layouts.pair_loss), layouts.init_pair(), part)
        rows.append(np.concatenate([g.ravel() for g in jax.tree.leaves(grad)]))
    return rows


def in_a_region(mesh, check_vma, step_of):
    """Runs two calls of 16 examples, and returns the hook's state and the compiled program."""
    params, batch = layouts.init_pair(), layouts.pair_batch()
    calls = jax.tree.map(lambda x: x.reshape(4, 2, 4, -1).swapaxes(0, 1).reshape(2, 16, -1), batch)

    def run(params, calls):
        tx, gradients = step_of()
        state = tx.init(params)
        for call in range(2):
            grads = gradients(params, jax.tree.map(operator.itemgetter(call), calls))
            _, state = tx.update(grads, state, params)
        return state.comm_state

    with jax.set_mesh(mesh):
        fun = jax.shard_map(run, in_specs=(P(), P(None, "dp")), out_specs=P(), check_vma=check_vma)
        compiled = jit(fun).lower(params, calls).compile()
        return jax.device_get(compiled(params, calls)), compiled


def multisteps():
    return gradaccum.MultiSteps(
        optax.scale(1.0), 2, axis_name="dp", comm_hook=gradient_noise_scale()
    )


def plain():
    def gradients(params, batch):
        if is_typed(["dp"]):
            params = jax.lax.pcast(params, ("dp",), to="varying")
        return jax.grad(layouts.pair_loss)(params, batch)

    return multisteps(), gradients


def counted(**options):
    def step_of():
        fun = gradaccum.unreduced_value_and_grad(layouts.pair_loss, axis_name="dp", **options)
        return multisteps(), lambda params, batch: fun(params, batch)[1]

    return step_of


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize(
    ("step_of", "weight"),
    [
        (plain, 2),
        (counted(), 8),
        (counted(loss_reduction="sum"), 0.5),
        (counted(grad_specs=({"up": P("dp"), "down": P(None, "dp"), "bias": P()},)), 8),
    ],
    ids=["plain", "counted", "sum", "zero"],
)
def test_in_a_manual_region_and_what_the_unit_is(step_of, weight, check_vma):
    mesh = layouts.mesh_of({"dp": 4, "mp": 1})
    state, compiled = in_a_region(mesh, check_vma, step_of)
    rows = np.array(pair_gradients())
    if weight == 0.5:  # n times a device's is what their sum would be, if all were as it
        rows = rows * 4
    assert_measured(state, rows, [weight] * 4)
    gradaccum.audit.assert_one_reduction(compiled, axis_name="dp", mesh=mesh, conditional=True)


def test_a_manual_model_axis_is_refused():
    mesh = layouts.mesh_of({"dp": 4, "mp": 2})
    with pytest.raises(ValueError, match=r"manual over the model axes \(mp=2\): a device has the"):
        in_a_region(mesh, False, counted())
