"""`cross_entropy` inside transformations and `accumulate`; its collectives and what it keeps."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_reference import (
    COLUMNS,
    LOGITS,
    PADDED,
    SHAPE,
    TARGETS,
    V,
    counted,
    losses_of,
    sharded,
    weighed,
)
from jax.sharding import PartitionSpec as P
from layouts import jit
from model_axis import mesh_of, modes

import gradaccum
from gradaccum import audit
from gradaccum.tensor_parallel import column_dense, cross_entropy, reduce_from

# --- Inside transformations ----------------------------------------------------------------------


def scanned(logits, targets, loss_fn):
    """Rows by a scan that is recomputed, tokens by vmap."""

    @jax.checkpoint
    def row(total, xs):
        losses = jax.vmap(lambda row, ids: loss_fn(jnp.tanh(row), ids))(*xs)
        return total + jnp.sum(losses**2), losses

    return jax.lax.scan(row, jnp.zeros((), logits.dtype), (logits, targets))


@modes
def test_scan_remat_vmap(typed):
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": PADDED}
    sharded_loss = functools.partial(cross_entropy, axis_name="mp", **options)

    def fun(logits, targets, loss_fn=sharded_loss):
        return jax.value_and_grad(scanned, has_aux=True)(logits, targets, loss_fn)

    specs = (COLUMNS, P()), ((P(), P()), COLUMNS)
    got = jit(sharded(fun, *specs, 4, typed))(LOGITS.astype(np.float32), TARGETS)
    with jax.enable_x64(True):
        wide = LOGITS.astype(np.float32).astype(np.float64)

        def total(logits):
            losses = losses_of(jnp.tanh(logits)[..., :PADDED], *counted(TARGETS, PADDED), 0.1, 0.1)
            return jnp.sum(losses**2), losses

        want = jit(jax.value_and_grad(total, has_aux=True))(wide)
    helpers.assert_close(got, jax.device_get(want), "float32")


@modes
def test_second_derivatives(typed):
    """The gradient of the squared norm of the gradient, over all shards."""
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": PADDED}

    def penalty(logits, loss_fn, total=lambda x: x):
        return total(jnp.sum(jax.grad(lambda x: weighed(x, loss_fn)[0])(logits) ** 2))

    def fun(logits, targets):
        loss_fn = functools.partial(cross_entropy, targets=targets, axis_name="mp", **options)
        total = functools.partial(reduce_from, axis_name="mp")
        return jax.grad(penalty)(logits, loss_fn, total)

    logits = LOGITS.astype(np.float32)
    got = jit(sharded(fun, (COLUMNS, P()), COLUMNS, 4, typed))(logits, TARGETS)
    with jax.enable_x64(True):

        def loss_fn(logits):
            return losses_of(logits[..., :PADDED], *counted(TARGETS, PADDED), 0.1, 0.1)

        fun = jax.grad(functools.partial(penalty, loss_fn=loss_fn))
        want = jax.device_get(jit(fun)(logits.astype(np.float64)))
    helpers.assert_close(got, want, "float32")


@modes
def test_accumulated_with_weights_it_is_the_mean_over_all_tokens(typed):
    """A head sharded over mp, data over dp, microbatches with 0 to 3 tokens: one weighted mean."""
    ids = np.random.default_rng(2).integers(-6, V, (8, 3))
    ids[:2] = -1  # the first microbatch of the first device has no token at all
    x, w = helpers.normal(3, 8, 3, 5).astype(np.float32), helpers.normal(4, 5, V).astype(np.float32)

    def count(x, ids):
        del x
        return jnp.sum(ids >= 0).astype(jnp.float32)

    def loss_fn(w, x, ids):
        losses = cross_entropy(column_dense(x, w, None, "mp"), ids, "mp")
        return jnp.sum(losses) / count(x, ids)

    accumulated = gradaccum.accumulate(
        loss_fn,
        microbatches=2,
        axis_name="dp",
        mesh=mesh_of(2, 2, names=("dp", "mp")),
        batch_argnums=(1, 2),
        weight_fn=count,
        in_specs=(P(None, "mp"),),
        check_vma=typed,
    )
    got = jit(jax.value_and_grad(accumulated))(w, x, ids)

    def plain(w):
        return jnp.sum(losses_of(x @ w, *counted(ids, V))) / np.sum(ids >= 0)

    helpers.assert_close(got, jit(jax.value_and_grad(plain))(w), "float32")
    rows = audit.collectives(jit(jax.value_and_grad(accumulated)), w, x, ids)
    assert {row.executions for row in rows if row.axes == ("dp",)} == {1}


# --- Collectives ---------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize(
    ("options", "parts"),
    [({}, 2), ({"z_loss": 0.1, "vocab_size": PADDED}, 2), ({"label_smoothing": 0.1}, 3)],
    ids=["plain", "z_loss", "smoothed"],
)
def test_two_all_reduces_forward_and_none_backward(typed, options, parts):
    def loss_fn(logits, targets):
        return cross_entropy(logits, targets, "mp", **options)

    def backward(logits, targets):
        # The cotangent is not known in advance, so the forward pass is there, and only once.
        return jax.grad(lambda x: jnp.sum(loss_fn(x, targets) ** 2))(logits)

    logits = LOGITS.astype(np.float32)
    for fun, out in (loss_fn, P()), (backward, COLUMNS):
        rows = audit.collectives(jit(sharded(fun, (COLUMNS, P()), out, 4, typed)), logits, TARGETS)
        found = sorted((row.kind, row.axes, row.dtype, row.bytes, row.executions) for row in rows)
        each = ("all-reduce", ("mp",), "f32")
        assert found == [(*each, 4 * 6, 1), (*each, 4 * 6 * parts, 1)], rows


@modes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_keeps_the_logits_and_nothing_else_of_their_size(typed, dtype):
    """No mask and no float32 copy: what a scan over chunks of tokens holds for each."""
    kept = []

    def fun(logits, targets):
        options = {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": PADDED}
        loss_fn = functools.partial(cross_entropy, targets=targets, axis_name="mp", **options)
        losses, backward = jax.vjp(loss_fn, logits)
        kept.extend(x for x in jax.tree.leaves(backward) if jnp.size(x) >= logits.size)
        return losses

    logits = jax.ShapeDtypeStruct((*SHAPE, V), dtype)
    jax.eval_shape(sharded(fun, (COLUMNS, P()), P(), 2, typed), logits, TARGETS)
    assert [(x.shape, x.dtype) for x in kept] == [((*SHAPE, V // 2), dtype)]
