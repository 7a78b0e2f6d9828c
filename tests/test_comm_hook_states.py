"""The state of communication hooks: where it is, when it changes, what it goes through."""

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
from user_hooks import Halved, as_arrays, grad_fn, halved, jit, mesh_of, reference, steps

import gradaccum
from gradaccum import hooks


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
