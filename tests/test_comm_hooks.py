"""The protocol of communication hooks: who calls them, and who divides."""

import dataclasses

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import PartitionSpec as P
from user_hooks import Halved, N, as_arrays, grad_fn, halved, jit, mesh_of, steps

import gradaccum
from gradaccum import hooks
from gradaccum._unreduced import is_unreduced


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
