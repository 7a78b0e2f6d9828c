"""`unreduced_value_and_grad` of decorated losses and methods, what it refuses, its traces."""

import contextlib
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from unreduced_rows import MESH, ON_MESH, N, jit, make, unreduced

import gradaccum
from gradaccum import audit


def test_a_decorated_loss_keeps_its_options():
    params, batch, want = make(reduction="tokens")
    decorated = helpers.accumulated("dense", "tokens", microbatches=2, **ON_MESH)
    fun = gradaccum.unreduced_value_and_grad(decorated)
    loss, grads = jit(fun)(params, batch)
    np.testing.assert_array_equal(loss.weight, batch["mask"].reshape(N, -1).sum(1))
    assert_close(gradaccum.mean((loss, grads)), want)
    assert fun.__name__ == decorated.__name__
    with pytest.raises(
        TypeError, match=r"microbatches, axis_name given beside a loss that gradacc"
    ):
        gradaccum.unreduced_value_and_grad(decorated, microbatches=2, axis_name="dp")


class Model:
    @functools.partial(gradaccum.accumulate, microbatches=2, batch_argnums=2, **ON_MESH)
    def loss(self, params, batch):
        return jnp.mean(helpers.dense(params, batch))

    def plain(self, params, batch):
        return jnp.mean(helpers.dense(params, batch))


@pytest.mark.parametrize("where", ["argument", "context"])
@pytest.mark.parametrize("method", ["decorated", "plain"])
def test_a_method_of_an_instance(method, where):
    params, batch, want = make()
    if method == "decorated":
        fun = gradaccum.unreduced_value_and_grad(Model().loss)
    else:
        fun = gradaccum.unreduced_value_and_grad(Model().plain, **ON_MESH)
    with jax.set_mesh(MESH) if where == "context" else contextlib.nullcontext():
        assert not audit.collectives(jax.jit(fun), params, batch, mesh=MESH)
        assert_close(gradaccum.mean(fun(params, batch)), want)


REFUSED = {
    "a batch argument": (
        {"argnums": 1},
        ValueError,
        r"unreduced_value_and_grad: argnums asks for the gradient of batch\['ids'\], .*"
        r"batch\['y'\], which batch_argnums splits: it belongs to one device, and has no mean",
    ),
    "one among them": (
        {"argnums": (0, -1)},
        ValueError,
        r"the gradient of batch\['x'\], batch\['y'\], which batch_argnums splits",
    ),
    "no such argument": ({"argnums": 2}, TypeError, r"argnums=2\) of a call with 2 positional"),
    "rows": (
        {"microbatches": 3},
        ValueError,
        r"\(64, 3\); axis 0 \(64\) is not divisible by microbatches \* data devices = 3 \* 8 = 24",
    ),
    "no such option": ({"microbatch": 2}, TypeError, r"unexpected keyword argument 'microbatch'"),
    "axis": (
        {"axis_name": "q"},
        ValueError,
        r"axis_name has 'q', but the mesh's axes are \(dp=8\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    options, error, message = REFUSED[name]
    params, batch, _ = make()
    if name in ("a batch argument", "one among them"):
        batch = {n: batch[n] for n in "xy"} if name == "one among them" else batch
        batch = {n: x.astype(np.float32) for n, x in batch.items()}
    with pytest.raises(error, match=message):
        unreduced(**options)(params, batch)


def test_a_loss_that_is_no_function_is_refused_at_once():
    with pytest.raises(TypeError):
        gradaccum.unreduced_value_and_grad(None, **ON_MESH)


def test_eager_calls_share_one_trace():
    params, batch, _ = make()
    params = jax.device_put(params, NamedSharding(MESH, P()))  # as the results lie
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return jnp.mean(helpers.dense(params, batch))

    for _ in range(2):
        fun = gradaccum.unreduced_value_and_grad(loss_fn, microbatches=2, **ON_MESH)
        for _ in range(3):
            params = jax.tree.map(lambda p, g: p - g, params, gradaccum.mean(fun(params, batch)[1]))
    assert len(traces) == 1


def test_a_jitted_step_is_traced_once():
    """Fed with its own rows: what is static of them does not change."""
    params, batch, want = make()
    traces = []
    fun = unreduced()

    @jit
    def step(total, params, batch):
        traces.append(1)
        return gradaccum.add(total, fun(params, batch))

    total = jax.tree.map(jnp.zeros_like, jit(fun)(params, batch))
    for _ in range(3):
        total = step(total, params, batch)
    assert len(traces) == 1
    assert_close(gradaccum.mean(total), want)
