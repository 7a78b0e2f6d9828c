"""Hooks check their arguments when they are made, and the state that they are given."""

import re

import helpers
import jax
import jax.numpy as jnp
import layouts
import optax
import pytest
from jax.sharding import AbstractMesh

import gradaccum
from gradaccum import hooks

ALL = {
    "allreduce": hooks.allreduce,
    "noop": hooks.noop,
    "bf16_compress": hooks.bf16_compress,
    "fp16_compress": hooks.fp16_compress,
    "int8_quantize": hooks.int8_quantize,
    "powersgd": hooks.powersgd,
}
BAD = [
    *[
        (name, {"axis_name": x}, f"{name}: axis_name is")
        for name in ALL
        for x in (3, (), ("a", "a"))
    ],
    ("powersgd", {"rank": 0}, "powersgd: rank=0; required: an int of at least 1."),
    ("powersgd", {"seed": 1.5}, "powersgd: seed=1.5; required: an int of at least 0."),
    ("powersgd", {"start_step": True}, "powersgd: start_step=True; required: an int"),
    ("powersgd", {"error_feedback": "no"}, "error_feedback='no'; required: True or False."),
    ("powersgd", {"warm_start": 2}, "warm_start=2; required: True or False."),
    ("int8_quantize", {"seed": "a"}, "int8_quantize: seed='a'; required: an int of at least 0."),
    ("int8_quantize", {"error_feedback": None}, "error_feedback=None; required: True or False."),
]


@pytest.mark.parametrize(("name", "fields", "message"), BAD)
def test_bad_fields(name, fields, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        ALL[name](**fields)


@pytest.mark.parametrize("name", ALL)
def test_a_list_of_axes_is_hashable(name):
    assert ALL[name](axis_name=["a", "b"]) == ALL[name](axis_name=("a", "b"))
    assert isinstance(hash(ALL[name](axis_name=["a"])), int)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decay": "x"}, "gradient_noise_scale: decay='x'; required: 0 <= decay < 1"),
        ({"decay": 1.0}, "gradient_noise_scale: decay=1.0; required: 0 <= decay < 1"),
        ({"hook": hooks.gradient_noise_scale()}, "measures already. Wrap what it wraps."),
    ],
)
def test_bad_fields_of_the_noise_scale(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        hooks.gradient_noise_scale(**fields)


def gradients():
    """Returns abstract gradients: nothing is computed before an error."""
    fun = gradaccum.unreduced_value_and_grad(
        layouts.pair_loss, axis_name="dp", mesh=helpers.data_mesh(8)
    )
    return jax.eval_shape(fun, layouts.init_pair(), layouts.pair_batch())[1]


STATES = {
    "powersgd of none": (hooks.powersgd(), (), "powersgd: its state is empty; .*PowerSGDState"),
    "powersgd of int8": (
        hooks.powersgd(),
        hooks.Int8State(jnp.zeros((), jnp.int32), None),
        "powersgd: its state is of type Int8State; required: the PowerSGDState",
    ),
    "noise of none": (hooks.gradient_noise_scale(), None, "its state is empty; .*NoiseScaleState"),
    "noise of another": (
        hooks.gradient_noise_scale(hooks.powersgd()),
        hooks.NoiseScaleState(*[jnp.zeros(())] * 4, inner=()),
        "powersgd: its state is empty",
    ),
    "bf16 of int8": (
        hooks.bf16_compress(),
        hooks.Int8State(jnp.zeros((), jnp.int32), None),
        "bf16_compress: its state is of type Int8State, but it has none",
    ),
    "int8 of int8 with a state": (
        hooks.int8_quantize(),
        hooks.Int8State(jnp.zeros((), jnp.int32), None),
        "int8_quantize: its state is of type Int8State, but it has none",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_of_another_hook(case):
    hook, state, message = STATES[case]
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda g: hook(g, state), gradients())


def test_a_state_of_a_hook_without_one():
    mesh = helpers.data_mesh(8)
    make = lambda hook: gradaccum.MultiSteps(  # noqa: E731
        optax.sgd(1.0), 2, axis_name="dp", mesh=mesh, comm_hook=hook
    )
    params = jax.tree.map(jnp.asarray, layouts.init_pair())
    state = make(hooks.gradient_noise_scale()).init(params)
    message = r"MultiSteps: the state holds a NoiseScaleState .*comm_state=\(\)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda g: make(None).update(g, state, params), gradients())
    with pytest.raises(ValueError, match=message):
        make(None).flush(state, params)


@pytest.mark.parametrize("name", ALL)
def test_an_unknown_axis_is_refused_by_init(name):
    tx = gradaccum.MultiSteps(
        optax.sgd(1.0),
        2,
        axis_name="dp",
        mesh=helpers.data_mesh(8),
        comm_hook=ALL[name](axis_name="replica"),
    )
    with pytest.raises(ValueError, match=f"{name}: axis_name='replica', but the gradients are"):
        jax.eval_shape(tx.init, layouts.init_pair())


def test_the_rows_of_what_the_noise_scale_wraps_move():
    """Its residuals have rows along the axes of the hook that it wraps."""
    mesh = layouts.mesh_of({"replica": 4, "fsdp": 2})
    inner = hooks.int8_quantize("replica", error_feedback=True, min_size=1)
    tx = gradaccum.MultiSteps(
        optax.sgd(1.0),
        2,
        axis_name=("replica", "fsdp"),
        mesh=mesh,
        comm_hook=hooks.gradient_noise_scale(inner),
    )
    state = jax.eval_shape(tx.init, layouts.init_pair())
    assert state.comm_state.inner.residual.rows[0]["up"].shape[0] == 4
    moved = tx.resize(state, AbstractMesh((2, 2), ("replica", "fsdp")))
    assert moved.comm_state.inner.residual.rows[0]["up"].shape[0] == 2
    assert moved.acc_grads["up"].shape[0] == 4
