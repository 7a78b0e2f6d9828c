"""The protocol of communication hooks: who calls them, where their state is, who divides."""

import dataclasses
import re
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import hooks
from gradaccum._unreduced import is_unreduced

jit = layouts.jit
N = 8


def mesh_of(n=N):
    return helpers.data_mesh(n)


def grad_fn(mesh, **options):
    return gradaccum.unreduced_value_and_grad(
        layouts.pair_loss, axis_name="dp", mesh=mesh, **options
    )


def reference(batch=None):
    batch = layouts.pair_batch() if batch is None else batch
    return layouts.in_float64(jax.grad(layouts.pair_loss), layouts.init_pair(), batch)


def as_arrays(tree):
    return jax.tree.map(jnp.asarray, tree)


# --- A hook of a user's own: no more than the protocol --------------------------------------------


class Kept(NamedTuple):
    count: Any
    seen: Any


@dataclasses.dataclass(frozen=True)
class Halved:
    """Sends half of each sum, and counts its calls."""

    keep: bool = True

    def init(self, unreduced):
        shape = lambda x: jnp.zeros(x.sum.shape[1:], x.sum.dtype)  # noqa: E731
        seen = jax.tree.map(shape, unreduced, is_leaf=is_unreduced)
        return Kept(jnp.zeros((), jnp.int32), seen) if self.keep else ()

    def __call__(self, unreduced, state):
        half = lambda x: dataclasses.replace(x, sum=x.sum / 2)  # noqa: E731
        mean = gradaccum.mean(jax.tree.map(half, unreduced, is_leaf=is_unreduced))
        return mean, Kept(state.count + 1, mean) if self.keep else state


def halved():
    return jax.tree.map(lambda g: g / 2, reference())


def test_the_decorator_calls_a_hook_of_ones_own():
    loss_fn = gradaccum.accumulate(
        layouts.pair_loss, microbatches=2, mesh=mesh_of(), comm_hook=Halved(keep=False)
    )
    step = jit(jax.value_and_grad(loss_fn))
    loss, grads = step(layouts.init_pair(), layouts.pair_batch())
    assert_close(grads, halved())
    full = layouts.in_float64(layouts.pair_loss, layouts.init_pair(), layouts.pair_batch())
    assert_close(loss, full, dtype="float32")  # a hook has the gradients alone
    gradaccum.audit.assert_one_reduction(
        step, layouts.init_pair(), layouts.pair_batch(), axis_name="dp", mesh=mesh_of()
    )


def test_an_undifferentiated_call_has_no_hook():
    called = []

    @dataclasses.dataclass(frozen=True)
    class Told(hooks.allreduce):
        def __call__(self, unreduced, state):
            called.append(unreduced)
            return super().__call__(unreduced, state)

    loss_fn = gradaccum.accumulate(
        layouts.pair_loss, microbatches=2, mesh=mesh_of(), comm_hook=Told()
    )
    jit(loss_fn)(layouts.init_pair(), layouts.pair_batch())
    assert not called
    jit(jax.grad(loss_fn))(layouts.init_pair(), layouts.pair_batch())
    assert len(called) == 1


@pytest.mark.parametrize("options", [{}, {"weight_fn": lambda b: b["x"][0, 0] ** 2}, "sum"])
def test_the_decorator_hands_over_what_makes_the_mean(options):
    """Weighted, summed or plain: rows' sums over rows' weights are the gradient."""
    options = {"loss_reduction": "sum"} if options == "sum" else options
    args = layouts.init_pair(), layouts.pair_batch()
    make = lambda **more: jit(  # noqa: E731
        jax.grad(
            gradaccum.accumulate(
                layouts.pair_loss, microbatches=2, mesh=mesh_of(), **options, **more
            )
        )
    )
    assert_close(make(comm_hook=hooks.allreduce())(*args), make()(*args), within=1e-6)


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_all_reduce_mean_calls_it(compiled):
    _, grads = grad_fn(mesh_of())(layouts.init_pair(), layouts.pair_batch())
    tx = gradaccum.all_reduce_mean("dp", mesh=mesh_of(), comm_hook=Halved())
    state = tx.init(as_arrays(layouts.init_pair()))
    update = jit(tx.update) if compiled else tx.update
    for count in (1, 2):
        mean, state = update(grads, state)
        assert_close(mean, halved())
        assert int(state.count) == count
    assert_close(state.seen, halved())


@pytest.mark.parametrize("typed", [False, True])
def test_inside_a_shard_map_a_hook_has_the_devices_own_row(typed):
    mesh = mesh_of()
    tx = gradaccum.MultiSteps(optax.sgd(1.0), 2, axis_name="dp", comm_hook=Halved())

    def local(params, batch):
        state, rows = tx.init(params), []
        varying = jax.tree.map(lambda x: jax.lax.pcast(x, "dp", to="varying"), params)
        for _ in range(2):
            grads = jax.grad(layouts.pair_loss)(varying if typed else params, batch)
            updates, state = tx.update(grads, state, params)
            rows.append(updates)
        return rows, state.comm_state.count

    region = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=typed
    )
    (first, second), count = jit(region)(layouts.init_pair(), layouts.pair_batch())
    assert all(not np.any(x) for x in jax.tree.leaves(first))
    assert_close(second, jax.tree.map(lambda g: -g, halved()))
    assert int(count) == 1


# --- Where the state is ---------------------------------------------------------------------------


def steps(tx, mesh, calls, *, state=None, bad=(), params=None):
    """Returns the updates and states of some calls; in `bad` ones the batch has an inf."""
    fun = grad_fn(mesh)
    params = layouts.place(layouts.init_pair(), mesh, {"up": P(), "down": P(), "bias": P()})
    state = tx.init(params) if state is None else state

    @jit
    def step(state, batch):
        loss, grads = fun(params, batch)
        return tx.update(grads, state, params, value=loss)

    found = []
    for i in calls:
        batch = dict(layouts.pair_batch())
        if i in bad:
            batch["y"] = np.full_like(batch["y"], np.inf)
        updates, state = step(state, batch)
        found.append((updates, state))
    assert step._cache_size() == 1
    return found


def same(a, b):
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_the_state_changes_once_a_window():
    tx = gradaccum.MultiSteps(optax.sgd(1.0), 3, axis_name="dp", mesh=mesh_of(), comm_hook=Halved())
    found = steps(tx, mesh_of(), range(6))
    assert [int(s.comm_state.count) for _, s in found] == [0, 0, 1, 1, 1, 2]
    assert_close(found[2][1].comm_state.seen, halved())
    assert optax.tree.get(found[-1][1], "count") == 2


def test_a_dropped_window_leaves_the_state_as_it_was():
    tx = gradaccum.MultiSteps(
        optax.sgd(1.0),
        2,
        should_skip_update_fn=optax.skip_not_finite,
        axis_name="dp",
        mesh=mesh_of(),
        comm_hook=Halved(),
    )
    found = steps(tx, mesh_of(), range(6), bad=(3,))
    states = [s for _, s in found]
    assert same(states[3].comm_state, states[1].comm_state)
    assert int(states[3].gradient_step) == 1
    assert [int(s.comm_state.count) for s in states] == [0, 1, 1, 1, 1, 2]
    assert_close(found[5][0], jax.tree.map(lambda g: -g, halved()))


def test_flush_calls_it():
    tx = gradaccum.MultiSteps(optax.sgd(1.0), 3, axis_name="dp", mesh=mesh_of(), comm_hook=Halved())
    _, state = steps(tx, mesh_of(), range(2))[-1]
    updates, state = tx.flush(state, as_arrays(layouts.init_pair()))
    assert_close(updates, jax.tree.map(lambda g: -g, halved()))
    assert int(state.comm_state.count) == 1
    updates, state = tx.flush(state, as_arrays(layouts.init_pair()))  # of an empty window
    assert all(not np.any(x) for x in jax.tree.leaves(updates))
    assert int(state.comm_state.count) == 1


def test_the_state_can_be_donated():
    mesh = mesh_of()
    tx = gradaccum.MultiSteps(optax.sgd(1.0), 1, axis_name="dp", mesh=mesh, comm_hook=Halved())
    params = layouts.place(layouts.init_pair(), mesh, {"up": P(), "down": P(), "bias": P()})
    fun = grad_fn(mesh)
    state = tx.init(params)
    step = jax.jit(lambda s, b: tx.update(fun(params, b)[1], s, params), donate_argnums=0)
    before = jax.tree.leaves(state._replace(comm_state=()))  # `seen` is not read
    _, state = step(state, layouts.pair_batch())
    assert all(x.is_deleted() for x in before if x.ndim)
    _, state = step(state, layouts.pair_batch())
    assert int(state.comm_state.count) == 2


def test_a_state_goes_through_a_checkpoint(tmp_path):
    """With a residual: saved in mid-window and restored, a run goes on bitwise."""
    mesh = mesh_of()
    hook = hooks.int8_quantize(error_feedback=True, min_size=1, block_size=8)
    tx = gradaccum.MultiSteps(optax.sgd(1.0), 2, axis_name="dp", mesh=mesh, comm_hook=hook)
    whole = steps(tx, mesh, range(6))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", whole[2][1])
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, whole[2][1])
        )
    rest = steps(tx, mesh, range(3, 6), state=restored)
    assert same(rest[-1], whole[-1])
    assert np.any(np.asarray(rest[-1][1].comm_state.residual.rows["up"]))


@pytest.mark.parametrize("n", [4, 2, 1])
def test_a_residual_moves_to_other_devices(n):
    """The mean of what is kept stays: 8 rows become n, and n become 8 again."""
    big, small = mesh_of(), mesh_of(n)
    hook = hooks.int8_quantize(error_feedback=True, min_size=1, block_size=8)
    tx = gradaccum.MultiSteps(optax.sgd(1.0), 2, axis_name="dp", comm_hook=hook)
    with jax.set_mesh(big):
        _, state = steps(tx, big, range(2))[-1]
    moved = tx.resize(state, small)
    kept, was = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), s.comm_state.residual.rows)
        for s in (moved, state)
    )
    assert {x.shape[0] for x in jax.tree.leaves(kept)} == {n}
    assert np.any(was["up"])
    for name in was:
        np.testing.assert_allclose(kept[name].mean(0), was[name].mean(0), atol=1e-9)
    shapes = tx.resize(jax.eval_shape(lambda s: s, state), jax.sharding.AbstractMesh((n,), ("dp",)))
    got = jax.tree.map(lambda x: x.shape, shapes.comm_state)
    assert got == jax.tree.map(lambda x: x.shape, moved.comm_state)
    back = tx.resize(moved, big)
    assert back.comm_state.residual.rows["up"].sharding == NamedSharding(big, P("dp", None, None))


def test_it_stands_in_a_chain_a_mask_and_a_multi_transform():
    mesh = mesh_of()
    _, grads = jit(grad_fn(mesh))(layouts.init_pair(), layouts.pair_batch())
    make = lambda hook: gradaccum.MultiSteps(  # noqa: E731
        optax.sgd(1.0), 1, axis_name="dp", mesh=mesh, comm_hook=hook
    )
    tx = optax.multi_transform(
        {"half": make(Halved()), "whole": make(None)},
        {"up": "half", "down": "whole", "bias": "half"},
    )
    params = as_arrays(layouts.init_pair())
    updates, _ = jit(tx.update)(grads, tx.init(params), params)
    want = {**halved(), "down": reference()["down"]}
    assert_close(updates, jax.tree.map(lambda g: -g, want))


# --- H6: the hook alone divides -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Constant:
    """Returns ones, whatever it is given."""

    def init(self, unreduced):
        return ()

    def __call__(self, unreduced, state):
        ones = lambda x: jnp.ones(x.sum.shape[1:])  # noqa: E731
        return jax.tree.map(ones, unreduced, is_leaf=is_unreduced), state


def test_h6_nothing_is_divided_after_a_hook():
    args, mesh = (layouts.init_pair(), layouts.pair_batch()), mesh_of()
    ones = jax.tree.map(np.ones_like, layouts.init_pair())
    loss_fn = gradaccum.accumulate(
        layouts.pair_loss,
        microbatches=2,
        mesh=mesh,
        weight_fn=lambda b: b["x"].shape[0] * 3.0,
        comm_hook=Constant(),
    )
    assert_close(jit(jax.grad(loss_fn))(*args), ones)
    tx = gradaccum.MultiSteps(optax.scale(1.0), 2, axis_name="dp", mesh=mesh, comm_hook=Constant())
    assert_close(steps(tx, mesh, range(2))[-1][0], ones)


# --- Errors ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Returning:
    """Returns what it is told to."""

    what: Any

    def init(self, unreduced):
        return ()

    def __call__(self, unreduced, state):
        return self.what(unreduced)


def _means(u):
    return gradaccum.mean(u)


WRONG = {
    "no pair": (_means, TypeError, r"comm_hook Returning returned .*must return \(mean, state\)"),
    "another structure": (
        lambda u: ({"up": _means(u)["up"]}, ()),
        ValueError,
        "returned a mean of the structure .*Return the same structure, one array a leaf",
    ),
    "still unreduced": (lambda u: (u, ()), TypeError, "still Unreduced: .*'up'"),
    "another shape": (
        lambda u: ({**_means(u), "bias": jnp.zeros((3,))}, ()),
        ValueError,
        r"\['bias'\] has \(3,\), needed \(8,\)",
    ),
    "another state": (
        lambda u: (_means(u), jnp.zeros(())),
        ValueError,
        "returned a state of another form than it was given",
    ),
}


@pytest.mark.parametrize("decorated", [True, False], ids=["decorated", "all_reduce_mean"])
@pytest.mark.parametrize("case", WRONG)
def test_what_a_hook_returns_is_checked(case, decorated):
    what, error, message = WRONG[case]
    hook = Returning(what)
    args = layouts.init_pair(), layouts.pair_batch()
    if decorated:
        loss_fn = gradaccum.accumulate(
            layouts.pair_loss, microbatches=1, mesh=mesh_of(), comm_hook=hook
        )
        with pytest.raises(error, match=message):
            jax.grad(loss_fn)(*args)
        return
    _, grads = jax.eval_shape(grad_fn(mesh_of()), *args)
    tx = gradaccum.all_reduce_mean("dp", mesh=mesh_of(), comm_hook=hook)
    with pytest.raises(error, match=message):
        jax.eval_shape(tx.update, grads, ())


def make_multi_steps(hook, **options):
    return gradaccum.MultiSteps(optax.sgd(1.0), 2, comm_hook=hook, **options)


def make_mean(hook, **options):
    return gradaccum.all_reduce_mean("dp", comm_hook=hook)


@pytest.mark.parametrize("make", [make_multi_steps, make_mean], ids=["MultiSteps", "mean"])
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (hooks.bf16_compress, r"comm_hook is the class bf16_compress; give an instance"),
        (lambda u, s: (u, s), r"must have init\(unreduced\) -> state and be callable"),
        (Returning([]), "not hashable"),
    ],
    ids=["a class", "no init", "no hash"],
)
def test_what_is_no_hook(make, hook, message):
    with pytest.raises(TypeError, match=message):
        make(hook, axis_name="dp")


def test_a_hook_needs_rows():
    with pytest.raises(ValueError, match=r"comm_hook=allreduce\(.*without axis_name"):
        make_multi_steps(hooks.allreduce())


@pytest.mark.parametrize("hook", [Halved(), hooks.powersgd(), hooks.int8_quantize(seed=1)])
def test_the_decorator_refuses_a_state(hook):
    loss_fn = gradaccum.accumulate(
        layouts.pair_loss, microbatches=1, mesh=mesh_of(), comm_hook=hook
    )
    args = layouts.init_pair(), layouts.pair_batch()
    if isinstance(hook, hooks.int8_quantize):  # has none, as it is
        jax.eval_shape(jax.grad(loss_fn), *args)
        return
    with pytest.raises(ValueError, match=r"has a state of \d arrays.*MultiSteps"):
        jax.grad(loss_fn)(*args)


def test_reduce_dtype_beside_a_hook():
    loss_fn = gradaccum.accumulate(
        layouts.pair_loss,
        microbatches=1,
        mesh=mesh_of(),
        reduce_dtype=jnp.bfloat16,
        comm_hook=hooks.allreduce(),
    )
    with pytest.raises(ValueError, match=r"reduce_dtype=bfloat16 .* beside comm_hook allreduce"):
        jax.grad(loss_fn)(layouts.init_pair(), layouts.pair_batch())
    _, grads = jax.eval_shape(
        grad_fn(mesh_of(), reduce_dtype=jnp.bfloat16), layouts.init_pair(), layouts.pair_batch()
    )
    tx = gradaccum.all_reduce_mean("dp", mesh=mesh_of(), comm_hook=hooks.allreduce())
    with pytest.raises(ValueError, match=r"reduce_dtype=bfloat16 .* beside comm_hook allreduce"):
        jax.eval_shape(tx.update, grads, ())


def test_unknown_axes_of_a_hook():
    _, grads = jax.eval_shape(grad_fn(mesh_of()), layouts.init_pair(), layouts.pair_batch())
    hook = hooks.bf16_compress(axis_name="replica")
    with pytest.raises(ValueError, match=re.escape("axis_name='replica', but the gradients are")):
        jax.eval_shape(lambda g: hook(g, ()), grads)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("sizes", "axes", "slow", "spec", "want"),
    [
        ({"dp": 8}, "dp", None, P(), P("dp")),
        ({"replica": 2, "fsdp": 4}, ("replica", "fsdp"), "replica", P("fsdp"), ("replica", "fsdp")),
        ({"dp": 4, "mp": 2}, "dp", None, P(None, "mp"), ("dp", None, "mp")),
    ],
    ids=["replicated", "hsdp", "model"],
)
def test_a_residual_is_laid_out_by_a_jitted_init_too(sizes, axes, slow, spec, want, kind):
    """One row a device along the compressed axes; split as the gradient is over the others."""
    mesh = layouts.mesh_of(sizes, kind)
    hook = hooks.int8_quantize(slow, error_feedback=True, min_size=1, block_size=8)
    tx = gradaccum.MultiSteps(optax.sgd(1.0), 2, axis_name=axes, comm_hook=hook)
    with jax.set_mesh(mesh):
        param = jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, spec))
        eager, compiled = tx.init(param), jax.jit(tx.init)(param)
    for state in (eager, compiled):
        rows = state.comm_state.residual.rows
        assert rows.shape == (sizes[slow or axes], 16, 32)
        # Auto axes do not say, under jit, what splits the parameter over data axes.
        known = want if kind is AxisType.Explicit or state is eager or not slow else (slow,)
        assert rows.sharding.is_equivalent_to(NamedSharding(mesh, P(*known)), 3), rows.sharding


def test_a_second_derivative_through_a_hook_is_refused():
    """What is rounded has the derivative 0: not the mean's."""
    make = lambda **more: gradaccum.accumulate(  # noqa: E731
        lambda w, x: jnp.mean((x @ w) ** 2),
        microbatches=1,
        mesh=mesh_of(),
        fused=False,
        **more,
    )
    args = jnp.ones(4), jnp.ones((N, 4))
    second = lambda fun: jax.grad(lambda w: jnp.sum(jax.grad(fun)(w, args[1])))(args[0])  # noqa: E731
    assert np.all(np.asarray(second(make())) > 0)
    for hook in (hooks.int8_quantize(min_size=1), hooks.fp16_compress()):
        with pytest.raises(TypeError, match="a second derivative through comm_hook"):
            second(make(comm_hook=hook))
