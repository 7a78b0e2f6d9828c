"""Break what one part promises another, one at a time: chex must object on every trace."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core as jex_core
from jax.sharding import AxisType

import gradaccum
from gradaccum import _contribution, _device, _normalise, _trace


def loss_fn(params, batch):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params["stack"])
    return jnp.mean(h @ params["out"])


PARAMS = {"stack": jnp.ones((2, 3, 3)), "out": jnp.ones((3,), jnp.bfloat16)}


def gradients(**options):
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    f = gradaccum.accumulate(loss_fn, microbatches=2, mesh=mesh, **options)
    # An own function object each time: a cached program would not be traced.
    return jax.jit(lambda p, x: jax.grad(f)(p, x))(PARAMS, jnp.ones((8, 3)))


def test_unbroken():
    assert jax.tree.map(jnp.shape, gradients()) == jax.tree.map(jnp.shape, PARAMS)


def split_into_too_many(monkeypatch):
    split = _device.split
    monkeypatch.setattr(_device, "split", lambda x, k: split(x, 2 * k))


def transpose_the_split(monkeypatch):
    split = _device.split
    monkeypatch.setattr(_device, "split", lambda x, k: jnp.concatenate([split(x, k)] * 2, axis=1))


def weigh_each_row(monkeypatch):
    trace = _trace.trace_weight

    def broken(*args):
        weight = jex_core.jaxpr_as_fun(trace(*args))
        return jax.make_jaxpr(lambda *arrays: weight(*arrays)[0][None])(*args[-1])

    monkeypatch.setattr(_trace, "trace_weight", broken)


def lose_a_row_of_the_loss(monkeypatch):
    trace = _trace.trace_loss

    def broken(*args):
        program, *rest = trace(*args)
        loss = jex_core.jaxpr_as_fun(program)
        return jax.make_jaxpr(lambda *arrays: [loss(*arrays)[0][None]])(*args[-1]), *rest

    monkeypatch.setattr(_trace, "trace_loss", broken)


def accumulate_in_the_leafs_dtype(monkeypatch):
    contribution = _contribution._contribution

    def broken(*args):
        sums, rows = contribution(*args)
        grads = [None if g is None else g.astype(jnp.bfloat16) for g in sums.grads]
        return sums._replace(grads=grads), rows

    monkeypatch.setattr(_contribution, "_contribution", broken)


def accumulate_another_shape(monkeypatch):
    contribution = _contribution._contribution

    def broken(*args):
        sums, rows = contribution(*args)
        return sums._replace(grads=[None if g is None else g[None] for g in sums.grads]), rows

    monkeypatch.setattr(_contribution, "_contribution", broken)


def reduce_to_another_shape(monkeypatch):
    psum = jax.lax.psum
    monkeypatch.setattr(
        jax.lax, "psum", lambda x, axes: jax.tree.map(lambda a: a[None], psum(x, axes))
    )


def lose_a_leaf_in_the_mean(monkeypatch):
    psum = jax.lax.psum

    def broken(x, axes):
        total = psum(x, axes)
        return total._replace(grads=[None, *total.grads[1:]])

    monkeypatch.setattr(jax.lax, "psum", broken)


def return_another_shape(monkeypatch):
    normalise = _normalise.normalise

    def broken(total, rows, **options):
        total, rows = normalise(total, rows, **options)
        return total._replace(grads=jax.tree.map(lambda g: g.T[..., None], total.grads)), rows

    monkeypatch.setattr(_normalise, "normalise", broken)


MUTATIONS = [
    split_into_too_many,
    transpose_the_split,
    weigh_each_row,
    lose_a_row_of_the_loss,
    accumulate_in_the_leafs_dtype,
    accumulate_another_shape,
    reduce_to_another_shape,
    lose_a_leaf_in_the_mean,
    return_another_shape,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by-value"])
def test_chex_objects(monkeypatch, mutate, fused):
    mutate(monkeypatch)
    weight_fn = (lambda x: jnp.float32(1)) if mutate is weigh_each_row else None
    with pytest.raises(AssertionError, match=r"\[Chex\]|Assertion"):
        gradients(fused=fused, weight_fn=weight_fn)
