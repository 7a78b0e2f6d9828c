"""Copies and sums over a manual axis that a loss lacks, or has too many of, and its weights."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from manual_model import (
    BATCH,
    PARAMS,
    SPECS,
    B,
    D,
    decorate,
    expected,
    f,
    g,
    loss_fn,
    mesh,
    named,
    parallel,
)

import gradaccum
from gradaccum.tensor_parallel import copy_to, reduce_from


def scaled(p, batch):
    """The input is computed from a replicated parameter."""
    return batch | {"x": batch["x"] * p["b"][None]}


def no_copy(p, batch):
    return loss_fn(p, scaled(p, batch), g=g)


def test_typed_replicated_values_need_no_copy_to():
    got = layouts.jit(jax.value_and_grad(decorate(no_copy, check_vma=True)))(PARAMS, BATCH)
    want = layouts.in_float64(
        jax.value_and_grad(lambda p, b: loss_fn(p, scaled(p, b))), PARAMS, BATCH
    )
    helpers.assert_close(got, want, within=2e-5)


@named("how", ["grad", "method"])
def test_a_replicated_value_without_copy_to_is_refused(how):
    """Each device would have a part of the bias's gradient."""
    loss = decorate(no_copy)
    run = {"grad": jax.grad(loss), "method": loss.value_and_grad()}[how]
    message = (
        "a value that is the same on all devices of mp is used where each has a part of its own "
        r"\(dot_general at .*manual_model.py:\d+.*\), .*"
        r"gradaccum.tensor_parallel.copy_to\(x, 'mp'\) there, or give check_vma=True"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        run(PARAMS, BATCH)
    with_copy = decorate(lambda p, batch: loss_fn(p, scaled(p, batch), f, g))
    got = layouts.jit(jax.value_and_grad(with_copy))(PARAMS, BATCH)
    want = layouts.in_float64(
        jax.value_and_grad(lambda p, b: loss_fn(p, scaled(p, b))), PARAMS, BATCH
    )
    helpers.assert_close(got, want, within=2e-5)


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (
            lambda p, batch: loss_fn(p, scaled(p, batch), lambda x: f(f(x)), g),
            "a value that has been through gradaccum.tensor_parallel.copy_to.*, or all_gather_to, "
            r"is used where all devices compute alike \(an operator at .*test_manual_copies.py:\d+",
        ),
        (
            lambda p, batch: f(parallel(p, batch)),
            r".* is used where all devices compute alike \(the loss itself at its end\)",
        ),
        (
            lambda p, batch: parallel({**p, "w": f(p["w"])}, batch),
            r".*, or scatter_to, is given a value of which each device of mp has its own \(an "
            r"operator at .*test_manual_copies.py:\d+.*Leave it out there",
        ),
    ],
    ids=["twice", "the loss", "a weight"],
)
def test_a_copy_to_too_many_is_refused(fun, message):
    """Gradients would be too large by the axis's size, or of other weights too."""
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        jax.grad(decorate(fun))(PARAMS, BATCH)


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_operators_over_a_data_axis_are_refused(check_vma):
    """Each device's batch is its own: untyped, gradients would be those of one device's loss."""

    def loss(p, batch):
        return parallel(p, batch) + reduce_from(jnp.mean(batch["x"] * p["b"][None]), "dp")

    message = (
        r"gradaccum.tensor_parallel is used over the data axis dp \(at .*test_manual_copies.py:\d+"
        ".*Give them the model axis alone, named in in_specs and not in axis_name; a sum"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        jax.grad(decorate(loss, check_vma=check_vma))(PARAMS, BATCH)


def no_sum(p, batch):
    return loss_fn(p, batch, f)


@named("how", ["grad", "method", "call"])
@pytest.mark.parametrize("aux", [False, True], ids=["loss", "aux"])
@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_a_loss_that_varies_over_a_model_axis_is_refused(check_vma, aux, how):
    """Of the loss, or of aux: a part of a sum that is to be of all parts."""
    fun = (lambda p, b: (parallel(p, b), no_sum(p, b))) if aux else no_sum
    loss = decorate(fun, check_vma=check_vma, has_aux=aux)
    run = {"grad": jax.grad(loss, has_aux=aux), "method": loss.value_and_grad(), "call": loss}[how]
    message = (
        "in_specs names the model axis mp, so the loss sees one device's shard and the loss, or "
        "its aux, varies over it: .* Sum it with gradaccum.tensor_parallel.reduce_from "
        r"\(or, with check_vma=True, jax.lax.psum\)"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        run(PARAMS, BATCH)


# --- Weights -------------------------------------------------------------------------------------


def test_a_weight_that_differs_over_a_model_axis_is_refused():
    """The devices of one microbatch would disagree on whether it runs, and hang."""
    specs = (SPECS, {"x": P("dp"), "y": P("dp"), "mask": P("dp", "mp")})
    batch = BATCH | {"mask": np.ones((B, 4), np.float32)}
    fun = lambda p, batch: parallel(p, {n: batch[n] for n in "xy"})  # noqa: E731
    loss = decorate(fun, in_specs=specs, weight_fn=lambda batch: batch["mask"].sum())
    with pytest.raises(ValueError, match=r"splits the batch over the model axis mp too.*psum\(wei"):
        jax.grad(loss)(PARAMS, batch)
    loss = decorate(
        fun, in_specs=specs, weight_fn=lambda batch: lax.psum(batch["mask"].sum(), "mp")
    )
    got = layouts.jit(jax.value_and_grad(loss))(PARAMS, batch)
    helpers.assert_close(got, expected(), within=2e-5)


@jax.custom_vjp
def own_matmul(x, w):
    """A kernel of the user's with its own rule, which does not communicate."""
    return x @ w


own_matmul.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda xw, ct: (ct @ xw[1].T, jnp.swapaxes(xw[0], 0, 1) @ ct)
)


@pytest.mark.parametrize("copied", [False, True], ids=["without copy_to", "with copy_to"])
def test_a_replicated_value_in_a_call_with_its_own_rule(copied):
    def loss(p, batch, f=lambda x: x, g=lambda x: x):
        y = g(jnp.tanh(own_matmul(f(scaled(p, batch)["x"]), p["w"])) @ p["v"])
        return jnp.mean(jnp.sin(y) * batch["y"])

    fun = decorate(functools.partial(loss, f=f if copied else lambda x: x, g=g))
    if not copied:
        with pytest.raises(ValueError, match=r"copy_to\(x, 'mp'\) there"):
            jax.grad(fun)(PARAMS, BATCH)
        return
    got = layouts.jit(jax.value_and_grad(fun))(PARAMS, BATCH)
    want = layouts.in_float64(jax.value_and_grad(loss), PARAMS, BATCH)
    helpers.assert_close(got, want, within=2e-5)


def test_two_model_axes_each_with_its_own_sum():
    """Tokens split over sp, weights over tp: a sum over sp of what is replicated over tp."""
    specs = {"w": P(None, "tp"), "v": P("tp"), "b": P()}

    def loss(p, batch):
        p = jax.tree.map(lambda x: copy_to(x, "sp"), p)
        x = copy_to(batch["x"] * p["b"][None, None], "tp")
        y = reduce_from(jnp.tanh(x @ p["w"]) @ p["v"], "tp")
        return reduce_from(jnp.mean(jnp.sin(y) * batch["y"]), "sp") / 2

    batch = {n: x.reshape(B // 2, 2, D) for n, x in BATCH.items()}
    fun = gradaccum.accumulate(
        loss,
        microbatches=2,
        axis_name="dp",
        mesh=layouts.mesh_of({"dp": 2, "sp": 2, "tp": 2}),
        in_specs=(specs, P("dp", "sp")),
    )
    got = layouts.jit(jax.value_and_grad(fun))(PARAMS, batch)
    want = layouts.in_float64(
        jax.value_and_grad(
            lambda p, b: jnp.mean(
                jnp.sin(jnp.tanh((b["x"] * p["b"][None]) @ p["w"]) @ p["v"]) * b["y"]
            )
        ),
        PARAMS,
        BATCH,
    )
    helpers.assert_close(got, want, within=2e-5)


# --- Inside an outer region, where shard_map has split the arrays already ------------------------


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        pytest.param(loss_fn, {}, "the loss, or its aux, varies over it", id="no sum"),
        pytest.param(no_copy, {}, "give the outer jax.shard_map check_vma=True", id="no copy"),
        pytest.param(
            lambda p, batch: g(jnp.mean(jnp.sum(f(p["b"])) * batch["x"])),
            {"weight_fn": lambda batch: jnp.sum(batch["x"] > 0), "batch": P("dp", "mp")},
            "return that of all parts, jax.lax.psum",
            id="weight of a part",
        ),
    ],
)
def test_inside_an_outer_shard_map_the_same_is_refused(loss, options, message):
    options = dict(options)
    batch = options.pop("batch", P("dp"))
    fun = gradaccum.accumulate(
        loss, microbatches=2, axis_name="dp", in_specs=(SPECS, batch), **options
    )
    outer = jax.shard_map(
        jax.grad(fun), mesh=mesh(), in_specs=(SPECS, batch), out_specs=SPECS, check_vma=False
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(outer, PARAMS, BATCH)
