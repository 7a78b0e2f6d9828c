"""The program's model: causal, its first loss log 256, its parameters float32 and stacked."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from absl_apps import transformer

CONFIG = transformer.Config(d_model=32, n_layer=3, n_head=4, compute_dtype="float32")

apply = jax.jit(transformer.apply, static_argnums=2)
loss = jax.jit(transformer.loss, static_argnums=2)


def random_params(config):
    """Parameters with a head that is not zero, so that logits depend on everything."""
    params = transformer.init(jax.random.key(0), config)
    params["head"] = jax.random.normal(jax.random.key(1), params["head"].shape)
    return params


def random_tokens(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_bytes_do_not_change_earlier_logits(dtype):
    config = transformer.Config(32, 3, 4, dtype)
    params, tokens = random_params(config), random_tokens(2, 16)
    changed = tokens.copy()
    changed[:, 9] ^= 0xFF
    before = apply(params, tokens, config)
    after = apply(params, changed, config)
    assert before.shape == (2, 16, 256)
    assert before.dtype == jnp.float32
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not np.any(np.all(np.asarray(before[:, 9:] == after[:, 9:]), axis=-1))


def test_order_of_earlier_bytes_matters():
    params, tokens = random_params(CONFIG), random_tokens(1, 8)
    swapped = tokens[:, [1, 0, *range(2, 8)]]
    before, after = (apply(params, t, CONFIG)[:, -1] for t in (tokens, swapped))
    assert not np.allclose(before, after, atol=1e-3)


def test_first_loss_is_that_of_a_uniform_guess():
    params = transformer.init(jax.random.key(0), CONFIG)
    first = loss(params, random_tokens(4, 17), CONFIG)
    np.testing.assert_allclose(first, math.log(256), rtol=1e-6)


def test_loss_is_the_mean_negative_log_probability_of_the_next_byte():
    params, tokens = random_params(CONFIG), random_tokens(2, 9)
    logits = np.asarray(apply(params, tokens[:, :-1], CONFIG), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.mean([log_probs[b, t, tokens[b, t + 1]] for b in range(2) for t in range(8)])
    np.testing.assert_allclose(loss(params, tokens, CONFIG), expected, rtol=1e-5)


def test_parameters_are_float32_and_layers_are_stacked():
    params = transformer.init(jax.random.key(0), CONFIG)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params["layers"])} == {3}
    # embedding and head, 12 d^2 + 2 d a layer, the last scale
    assert transformer.size(params) == 2 * 256 * 32 + 3 * (12 * 32 * 32 + 2 * 32) + 32


def test_program_size_does_not_grow_with_depth():
    def size(n_layer):
        config = transformer.Config(32, n_layer, 4)
        params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
        tokens = jax.ShapeDtypeStruct((2, 9), jnp.uint8)
        grad = jax.jit(jax.grad(transformer.loss), static_argnums=2)
        return len(grad.lower(params, tokens, config).as_text().splitlines())

    assert size(2) == size(24)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((128, 4, 3), r"d_model = 128 is not divisible by 2 \* n_head = 2 \* 3 = 6"),
        ((12, 4, 4), r"d_model = 12 is not divisible by 2 \* n_head = 2 \* 4 = 8"),
        ((128, 0, 4), "n_layer=0"),
    ],
    ids=["heads", "odd-heads", "no-layers"],
)
def test_impossible_sizes_are_refused_with_the_numbers(sizes, message):
    with pytest.raises(ValueError, match=message):
        transformer.Config(*sizes)
