"""`MultiSteps`: parameters equal a full-batch run's, with one reduction a window."""

import dataclasses
import warnings

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import audit

jit = layouts.jit
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESH = helpers.data_mesh(8)
WHOLE = {"w1": P(), "b1": P(), "w2": P()}
SPLIT = {"w1": P(None, "mp"), "b1": P("mp"), "w2": P("mp", None)}
FSDP = {"w1": P(None, "dp"), "b1": P(), "w2": P("dp")}
SHAPES = {"w1": (4, 8), "b1": (8,), "w2": (8, 3)}  # the model `dense`; all sizes divide
BYTES = 4 * (4 * 8 + 8 + 8 * 3) + 4 * 3  # of its gradients, and a weight for each
MOMENTUM = optax.sgd(0.3, momentum=0.9)


def make(calls, dtype=np.float32, reduction="mean"):
    """Returns parameters and one batch for each call; with tokens, calls have unequal weights."""
    p = {n: (helpers.normal(i, *s) / 2).astype(dtype) for i, (n, s) in enumerate(SHAPES.items())}
    rng = np.random.default_rng(3)
    mask = rng.random((calls, 16, 3)) < np.linspace(0.2, 0.9, calls)[:, None, None]
    mask[0, :4] = 0  # nothing on the first two of 8 devices
    shapes = {"x": (calls, 16, 3, 4), "y": (calls, 16, 3)}
    batch = {
        n: helpers.normal(5 + i, *s).astype(np.float32) for i, (n, s) in enumerate(shapes.items())
    }
    return p, batch | {"mask": mask.astype(np.float32)}


def place(tree, mesh, specs):
    return jax.tree.map(
        lambda s, x: jax.device_put(x, NamedSharding(mesh, s)), specs, tree,
        is_leaf=lambda s: isinstance(s, P),
    )  # fmt: skip


def in_full_batches(opt, params, batch, windows, reduction="mean", times=0):
    """Returns parameters after a run of the inner optimizer alone, unsharded, in float64.

    Args:
      windows: the calls of each window; their batches together are one full batch.
      times: 1 for the sum over calls (`use_grad_mean=False`).
    """
    loss_fn, state = helpers.loss_of("dense", reduction), None
    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, batch))
        state, start = opt.init(params), 0
        for size in windows:
            rows = jax.tree.map(
                lambda x, a=start, k=size: x[a : a + k].reshape(-1, *x.shape[2:]), batch
            )
            grads = jax.tree.map(lambda g, k=size: g * k**times, jax.grad(loss_fn)(params, rows))
            updates, state = opt.update(grads, state, params)
            params, start = optax.apply_updates(params, updates), start + size
        return jax.device_get(params)


@dataclasses.dataclass(frozen=True)
class Way:
    """Where a run computes: mesh axes and their type, how the mesh is given, who differentiates."""

    grads: str = "rows"  # "plain", "rows", or inside a shard_map "local", "local rows"
    sizes: tuple = (("dp", 8),)
    kind: AxisType = AUTO
    context: bool = False
    typed: bool = False
    specs: str = "whole"

    @property
    def mesh(self):
        return layouts.mesh_of(dict(self.sizes), self.kind)

    @property
    def on(self):
        return {"axis_name": "dp", "mesh": None if self.context else self.mesh}

    def tx(self, opt, k, **options):
        return gradaccum.MultiSteps(
            opt, k, **(options if self.grads == "plain" else options | self.on)
        )

    def step(self, tx, reduction, state):
        loss_fn = helpers.loss_of("dense", reduction)
        options = {"weight_fn": helpers.count_tokens} if reduction == "tokens" else {}
        unreduced = gradaccum.unreduced_value_and_grad(loss_fn, **self.on, **options)

        def grad(params, batch):
            if "rows" in self.grads:
                return unreduced(params, batch)[1]
            if self.typed:
                params = jax.tree.map(lambda p: jax.lax.pcast(p, "dp", to="varying"), params)
            return jax.grad(loss_fn)(params, batch)

        def step(params, state, batch):
            updates, state = tx.update(grad(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        if self.grads.startswith("local"):
            specs = jax.tree.map(lambda x: x.sharding.spec, state)
            step = jax.shard_map(step, mesh=self.mesh, in_specs=(P(), specs, P("dp")),
                                 out_specs=(P(), specs), check_vma=self.typed)  # fmt: skip
        return step

    def run(self, tx, params, batch, reduction="mean"):
        """Returns parameters, state, and after which calls `has_updated` was true."""
        specs = {"whole": WHOLE, "split": SPLIT, "fsdp": FSDP}[self.specs]
        params = place(params, self.mesh, specs)
        with jax.set_mesh(self.mesh) if self.context else warnings.catch_warnings():
            state, updated = tx.init(params), []
            step = jit(self.step(tx, reduction, state))
            for i in range(len(batch["x"])):
                rows = jax.tree.map(lambda x, i=i: x[i], batch)
                before = params
                rows = place(rows, self.mesh, jax.tree.map(lambda _: P("dp"), rows))
                params, state = step(params, state, rows)
                updated.append(bool(tx.has_updated(state)))
                pairs = zip(*map(jax.tree.leaves, jax.device_get((before, params))), strict=True)
                assert updated[-1] == any(np.any(a != b) for a, b in pairs)
        return params, state, updated


FOUR_BY_TWO = (("dp", 4), ("mp", 2))
WAYS = {
    "plain": Way("plain"),
    "mesh": Way(),
    "set_mesh": Way(context=True),
    "explicit": Way(kind=EXPLICIT),
    "explicit set_mesh": Way(kind=EXPLICIT, context=True),
    "mp": Way(sizes=FOUR_BY_TWO, specs="split"),
    "mp explicit set_mesh": Way(sizes=FOUR_BY_TWO, kind=EXPLICIT, context=True, specs="split"),
    "fsdp": Way(specs="fsdp"),
    "local": Way("local"),
    "local typed": Way("local", typed=True),
    "local rows": Way("local rows", context=True),
}


def assert_trains_as_full_batches(way, k, calls, reduction="mean", windows=None, **options):
    params, batch = make(calls)
    tx = way.tx(MOMENTUM, k, **options)
    got, state, updated = way.run(tx, params, batch, reduction)
    windows = windows or [k] * (calls // k)
    times = 0 if options.get("use_grad_mean", True) else 1
    assert_close(got, in_full_batches(MOMENTUM, params, batch, windows, reduction, times))
    ends = np.cumsum(windows)
    assert updated == [i + 1 in ends for i in range(calls)]
    assert (int(state.gradient_step), int(state.mini_step)) == (len(windows), calls - ends[-1])
    return state


@pytest.mark.parametrize("way", WAYS)
def test_o5_parameters_equal_a_full_batch_run_inside_a_shard_map_too(way):
    """Two windows of three calls and the start of a third."""
    assert_trains_as_full_batches(WAYS[way], 3, 7, windows=[3, 3])


@pytest.mark.parametrize("way", ["plain", "mesh", "local typed"])
@pytest.mark.parametrize("k", [1, 2])
def test_the_sum_over_calls(way, k):
    assert_trains_as_full_batches(WAYS[way], k, 4, use_grad_mean=False)


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("way", ["mesh", "mp", "local rows"])
def test_calls_of_unequal_weights(way, mean):
    """sum(w * gradient) / sum(w) over calls and devices, some of which have no token."""
    assert_trains_as_full_batches(WAYS[way], 3, 6, "tokens", use_grad_mean=mean)


def test_calls_of_unequal_sizes():
    """A row counts examples."""
    params, batch = make(2)
    step, (got, state, _) = program(WAYS["mesh"], WAYS["mesh"].tx(MOMENTUM, 2))
    for i, size in enumerate((16, 8)):
        got, state = jit(step)(got, state, {n: x[i, :size] for n, x in batch.items()})
    rows = {n: np.concatenate([x[0], x[1, :8]])[None] for n, x in batch.items()}
    assert_close(got, in_full_batches(MOMENTUM, params, rows, [1]))


@pytest.mark.parametrize("way", ["plain", "mesh"])
@pytest.mark.parametrize("static", [True, False], ids=["looked up", "computed"])
def test_a_schedule_makes_windows_of_what_they_hold(way, static):
    ks = [2, 1, 3]
    schedule = (lambda n: jnp.asarray(ks)[n]) if static else (lambda n: 2 + (n == 2) - (n == 1))
    assert_trains_as_full_batches(WAYS[way], schedule, 6, windows=ks)


@pytest.mark.parametrize("way", ["plain", "mesh"])
def test_a_state_restored_into_a_shorter_window(way):
    """Three calls of five, then k = 2: the next call closes a window of four."""
    way = WAYS[way]
    params, batch = make(4)
    head, tail = (jax.tree.map(lambda x, s=s: x[s], batch) for s in (slice(3), slice(3, 4)))
    _, state, _ = way.run(way.tx(MOMENTUM, 5), params, head)
    restored = way.tx(MOMENTUM, 2)._replace(init=lambda _: state)
    got, state, _ = way.run(restored, params, tail)
    assert_close(got, in_full_batches(MOMENTUM, params, batch, [4]))
    assert int(state.mini_step) == 0


# --- One reduction, in the branch that is taken --------------------------------------------------


def program(way, tx, params=None):
    """Returns the step and its arguments."""
    p, batch = make(1)
    params = place(p, way.mesh, WHOLE) if params is None else params
    rows = place(batch, way.mesh, jax.tree.map(lambda _: P(None, "dp"), batch))
    state = tx.init(params)
    return way.step(tx, "mean", state), (params, state, jax.tree.map(lambda x: x[0], rows))


@pytest.mark.parametrize("way", ["mesh", "explicit", "local", "local typed"])
def test_o2_each_byte_crosses_the_devices_once_a_window(way):
    way = WAYS[way]
    step, args = program(way, way.tx(optax.adamw(1e-3), 4))
    step = jit(step)
    report = audit.collectives(step, *args, mesh=way.mesh)
    assert all(row.conditional and row.kind == "all-reduce" for row in report)
    assert report.totals["dp"].bytes == BYTES
    audit.assert_one_reduction(step, *args, axis_name="dp", mesh=way.mesh, conditional=True)
    with pytest.raises(AssertionError, match="stands in a branch of a conditional"):
        audit.assert_one_reduction(step, *args, axis_name="dp", mesh=way.mesh)


def test_optax_reduces_in_every_call():
    step, args = program(Way("plain"), optax.MultiSteps(optax.adamw(1e-3), 4))
    report = audit.collectives(jit(step), *args, mesh=MESH)
    assert [row.conditional for row in report.over("dp") if row.bytes > 4] != []
    assert not any(row.conditional for row in report.over("dp"))


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "optax"])
def test_o2_the_inner_optimizer_runs_once_a_window(ours):
    ran = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: ran.append(1))
        return updates, state + 1

    inner = optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)
    tx = (gradaccum if ours else optax).MultiSteps(inner, 3)
    state, step = tx.init(jnp.ones(2)), jit(tx.update)
    for _ in range(6):
        _, state = step(jnp.ones(2), state)
    jax.effects_barrier()
    assert int(state.inner_opt_state) == 2
    assert len(ran) == (2 if ours else 6)


@pytest.mark.parametrize("way", ["plain", "mesh"])
def test_one_trace_serves_the_whole_run(way):
    """Of a state from an eager init, and parameters on the mesh; weak types included."""
    way, traces = WAYS[way], []

    def norm(grads, step, params):
        size = optax.tree.norm(grads)
        return size > 1e9, {"size": jnp.where(size > 1, 1.0, 0.0)}  # weak

    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    tx = way.tx(inner, 2, should_skip_update_fn=norm)
    step, args = program(way, tx)
    counted = jit(lambda *a: traces.append(1) or step(*a))
    params, state, rows = args
    for _ in range(6):
        params, state = counted(params, state, rows)
    assert len(traces) == 1
    assert int(state.gradient_step) == 3


@pytest.mark.parametrize("way", ["plain", "mesh", "local typed"])
def test_calls_in_a_scan(way):
    way = WAYS[way]
    params, batch = make(6)
    tx = way.tx(MOMENTUM, 2)
    step, (placed, state, _) = program(way, tx)
    spread = place(batch, way.mesh, jax.tree.map(lambda _: P(None, "dp"), batch))

    def body(carry, rows):
        carry = step(*carry, rows)
        return carry, tx.has_updated(carry[1])

    (got, _), updated = jit(lambda c, b: jax.lax.scan(body, c, b))((placed, state), spread)
    assert_close(got, in_full_batches(MOMENTUM, params, batch, [2, 2, 2]))
    assert updated.tolist() == [False, True] * 3
