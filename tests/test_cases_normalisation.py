"""Cases of normalisation: who divides, what is empty, what a statistic means; by hand and right."""

import functools
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import audit, frameworks

ONE = np.float32(1)
jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)


def decorate(fun, k=2, **options):
    return gradaccum.accumulate(fun, microbatches=k, axis_name=None, **options)


def says(documented, text):
    return text in re.sub(r"\s+", " ", documented.__doc__)


def test_n3_the_count_rides_with_the_gradients():
    """By hand the loss is divided by a count that is summed before it: two all-reduces."""

    def loss_fn(w, batch):
        return jnp.sum(batch["mask"] * (batch["x"] @ w)) / jnp.sum(batch["mask"])

    def by_hand(w, batch):
        count = jax.lax.psum(jnp.sum(batch["mask"]), "dp")
        total = lambda w: jnp.sum(batch["mask"] * (batch["x"] @ w)) / count  # noqa: E731
        return jax.lax.psum(jax.value_and_grad(total)(w), "dp")

    mesh, w = helpers.data_mesh(8), np.ones(3, np.float32)
    batch = {"x": np.arange(48, dtype=np.float32).reshape(16, 3)}
    batch["mask"] = np.array([1, 1, 1, 0] * 4, np.float32)
    specs = {"in_specs": (P(), P("dp")), "out_specs": P()}
    region = jax.shard_map(by_hand, mesh=mesh, check_vma=False, **specs)
    fun = gradaccum.accumulate(loss_fn, microbatches=2, mesh=mesh, weight_fn=helpers.count_tokens)
    values = {}
    for step, reductions in ((region, 2), (jax.value_and_grad(fun), 1)):
        compiled = jit(step).lower(w, batch).compile()
        assert [row.executions for row in audit.collectives(compiled)] == [1] * reductions
        values[reductions] = compiled(w, batch)
    helpers.assert_close(values[1], values[2])


def test_n4_a_microbatch_without_a_token_adds_nothing():
    """A `where` around 0/0 makes the loss 0, and its gradient NaN all the same."""

    def loss_fn(w, batch):
        count = jnp.sum(batch["mask"])
        return jnp.where(count > 0, jnp.sum(w * batch["x"] * batch["mask"]) / count, 0)

    batch = {"x": jnp.array([1.0, 3, 5, 7]), "mask": jnp.array([1.0, 1, 0, 0])}
    empty = {n: x[2:] for n, x in batch.items()}
    loss, grad = jit(jax.value_and_grad(loss_fn))(ONE, empty)
    assert float(loss) == 0
    assert np.isnan(grad)
    run = jit(jax.value_and_grad(decorate(loss_fn, weight_fn=helpers.count_tokens)))
    assert [float(x) for x in run(ONE, batch)] == [2, 2]
    assert [float(x) for x in run(ONE, batch | {"mask": jnp.zeros(4)})] == [0, 0]


@pytest.mark.parametrize("k", [1, 4])
def test_n6_the_library_divides_and_the_loss_does_not(k):
    """A loss that divides by k too is k times too small, as its owner has said."""
    x = np.array([6, 7, 8, 9], np.float32)
    grad = lambda fun: float(jax.grad(decorate(fun, k))(ONE, x))  # noqa: E731
    assert grad(lambda w, x: jnp.mean(w * x)) == 7.5
    assert grad(lambda w, x: jnp.mean(w * x) / k) == 7.5 / k
    assert says(gradaccum.accumulate, "Do not divide by k or n yourself.")


@pytest.mark.parametrize("n", [1, 2])
def test_n12_batch_statistics_are_averaged_over_microbatches_and_devices(n):
    """Of 1 to 8: the batch's variance is 5.25, that of its halves 1.25, as is documented."""

    def loss_fn(w, old, batch):
        new = {"mean": jnp.mean(batch), "var": jnp.var(batch)}
        return jnp.mean(w * batch), jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new)

    fun = gradaccum.accumulate(
        loss_fn, microbatches=2 // n, mesh=helpers.data_mesh(n), batch_argnums=2, has_aux=True
    )
    x, old = np.arange(1, 9, dtype=np.float32), {"mean": np.float32(10), "var": np.float32(20)}
    _, new = jit(jax.grad(fun, has_aux=True))(ONE, old, x)
    # One update of each moving average: two would keep 0.81 of the old.
    np.testing.assert_allclose(new["mean"], 0.9 * 10 + 0.1 * 4.5, rtol=1e-6)
    np.testing.assert_allclose(new["var"], 0.9 * 20 + 0.1 * 1.25, rtol=1e-6)
    assert np.var(x) == 5.25
    assert says(frameworks, "one moving-average update a step. The running mean is that of the")
    assert says(frameworks, "variance is the mean of microbatch variances, and so lacks")


def test_n10_what_is_not_additive_is_documented_as_an_average():
    """Its value: test_normalisation.py."""
    text = "such as a load-balance loss or a batch norm's statistics, is averaged over the"
    assert says(gradaccum.accumulate, text)
    assert says(gradaccum.accumulate, "that is not its full-batch value")
