"""What loss and gradients are divided by: tokens, microbatches, devices, or nothing."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scalar_losses import ONE, masked_mean, rows, run, scaled

import gradaccum


def test_n1_token_mean_over_microbatches_of_four_and_one_tokens():
    """Not 51.25, the mean of the microbatches' means."""
    batch = rows(1, 2, 3, 4, 100, 0, 0, 0, mask=[1.0, 1, 1, 1, 1, 0, 0, 0])
    loss, grad = run(masked_mean, ONE, batch, weight_fn=helpers.count_tokens)
    assert (float(loss), float(grad)) == (22, 22)
    assert float(run(masked_mean, ONE, batch)[0]) == 51.25


def test_n1_token_mean_over_two_devices():
    batch = rows(1, 2, 3, 4, 100, 0, 0, 0, mask=[1.0, 1, 1, 1, 1, 0, 0, 0])
    loss, grad = run(
        masked_mean,
        ONE,
        batch,
        microbatches=1,
        axis_name="dp",
        mesh=helpers.data_mesh(2),
        weight_fn=helpers.count_tokens,
    )
    assert (float(loss), float(grad)) == (22, 22)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_n4_a_batch_without_any_token_gives_zeros(n, fused):
    """In place as well as by value, and for the gradients of batch leaves too."""

    def loss_fn(params, batch):
        h, _ = jax.lax.scan(lambda h, w: (h * w, None), batch["x"], params["layers"])
        return masked_mean(params["w"], batch | {"x": h})

    params = {"layers": jnp.full((3,), 2.0), "w": ONE}
    batch = rows(1, 2, 3, 4, mask=[0.0] * 4)
    fun = gradaccum.accumulate(
        loss_fn,
        microbatches=2,
        mesh=helpers.data_mesh(n),
        weight_fn=helpers.count_tokens,
        fused=fused,
    )
    loss, grads = jax.jit(fun.value_and_grad((0, 1)))(params, batch)
    assert float(loss) == 0
    assert all(bool(jnp.all(g == 0)) for g in jax.tree.leaves(grads))


def test_n5_a_microbatch_dropped_for_nan_is_dropped_from_the_count_too():
    batch = rows(1, 2, np.nan, 4, 5, 6)
    finite = lambda batch: jnp.isfinite(batch["x"]).all() * batch["x"].size  # noqa: E731
    mean = lambda w, batch: jnp.mean(scaled(w, batch))  # noqa: E731
    loss, grad = run(mean, ONE, batch, microbatches=3, weight_fn=finite)
    assert (float(loss), float(grad)) == (3.5, 3.5)


def test_a_nan_that_nobody_drops_stays():
    loss, grad = run(lambda w, batch: jnp.mean(scaled(w, batch)), ONE, rows(1, 2, np.nan, 4))
    assert np.isnan(loss)
    assert np.isnan(grad)


def test_n7_a_loss_divided_by_the_global_batch_size_is_a_sum():
    """As a mean it would be divided twice: 1.875."""
    batch, size = rows(6, 7, 8, 9), 4
    loss_fn = lambda w, batch: jnp.sum(scaled(w, batch)) / size  # noqa: E731
    right = run(loss_fn, ONE, batch, microbatches=4, loss_reduction="sum")
    assert [float(x) for x in right] == [7.5, 7.5]
    assert [float(x) for x in run(loss_fn, ONE, batch, microbatches=4)] == [1.875, 1.875]


def test_n8_a_summed_loss_is_summed_only_if_said():
    batch = rows(10, 20, 40, 50)
    loss_fn = lambda w, batch: jnp.sum(scaled(w, batch))  # noqa: E731
    mesh = {"axis_name": "dp", "mesh": helpers.data_mesh(2)}
    right = run(loss_fn, ONE, batch, loss_reduction="sum", **mesh)
    assert [float(x) for x in right] == [120, 120]
    assert [float(x) for x in run(loss_fn, ONE, batch, **mesh)] == [30, 30]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_n10_a_load_balance_loss_is_averaged_over_microbatches(k):
    """A product of batch means is not additive: its mean over microbatches, never k times it."""

    def balance(w, batch):
        return jnp.sum(jnp.mean(w * batch["x"], axis=0) * jnp.mean(batch["y"], axis=0))

    rng = np.random.default_rng(0)
    batch = {n: jnp.asarray(rng.uniform(1, 2, (8, 3)), jnp.float32) for n in "xy"}
    got = run(balance, jnp.ones((1, 3)), batch, microbatches=k)
    parts = [
        jax.value_and_grad(balance)(
            jnp.ones((1, 3)), {n: x.reshape(k, -1, 3)[i] for n, x in batch.items()}
        )
        for i in range(k)
    ]
    helpers.assert_close(got, jax.tree.map(lambda *x: sum(x) / k, *parts))


def test_n11_a_regulariser_beside_a_token_mean_is_not_scaled_by_tokens():
    batch = rows(1, 2, 3, 4, 100, 0, 0, 0, mask=[1.0, 1, 1, 1, 1, 0, 0, 0])
    loss_fn = lambda w, batch: masked_mean(w, batch) + 0.5 * w**2  # noqa: E731
    loss, grad = run(loss_fn, jnp.float32(3), batch, weight_fn=helpers.count_tokens)
    assert (float(loss), float(grad)) == (66 + 4.5, 22 + 3)


@pytest.mark.parametrize("n", [1, 2])
def test_n13_the_loss_is_that_of_all_microbatches(n):
    """Not the last one's, and not divided by k; also where nothing is differentiated."""
    loss_fn = lambda w, batch: jnp.mean(scaled(w, batch))  # noqa: E731
    fun = gradaccum.accumulate(loss_fn, microbatches=2, mesh=helpers.data_mesh(n))
    batch = rows(1, 2, 3, 4)
    assert float(jax.jit(fun)(ONE, batch)) == 2.5
    assert float(jax.jit(jax.value_and_grad(fun))(ONE, batch)[0]) == 2.5
