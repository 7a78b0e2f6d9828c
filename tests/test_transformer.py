"""The program's model: causal, its first loss log 256, its parameters float32 and stacked.

And sharded over a model axis: the same loss and gradients as whole.
"""

import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from absl_apps import layers, meshes, transformer
from gradaccum import audit

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


################################### Sharded over a model axis ####################################

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)


def sharded_loss_and_grads(m, typed, sequence_parallel):
    def fun(params, tokens):
        of = layers.sharded("mp", sequence_parallel)
        return jax.value_and_grad(transformer.loss)(params, tokens, wide(), of)

    mesh, specs = meshes.make({"mp": m}, ""), transformer.specs("mp")
    return jit(
        jax.shard_map(
            fun, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs), check_vma=typed
        )
    )


def wide():
    return transformer.Config(16, 2, 4, "float64")


@functools.cache
def whole():
    """Parameters, tokens, and the unsharded loss and gradients, all in float64."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.asarray(x) * (1 + rng.normal(size=x.shape) / 4), random_params(wide())
    )
    with jax.enable_x64(True):
        fun = jit(jax.value_and_grad(transformer.loss), static_argnums=2)
        return params, random_tokens(4, 9), jax.device_get(fun(params, random_tokens(4, 9), wide()))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_sharded_it_has_the_loss_and_gradients_of_the_whole(m, typed, sequence_parallel):
    params, tokens, want = whole()
    with jax.enable_x64(True):
        got = sharded_loss_and_grads(m, typed, sequence_parallel)(params, tokens)
    helpers.assert_close(got, want, "float64")


def by_head(qkv, heads):
    """Columns [q | k | v], each of all heads, to those of each head's q, k and v, as they are."""
    L, D, columns = qkv.shape
    parts = qkv.reshape(L, D, 3, heads, columns // (3 * heads))
    return np.moveaxis(parts, 3, 2).reshape(L, D, columns)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_t15_a_contiguous_part_of_the_fused_columns_is_whole_heads(m):
    """T15. Of columns [q | k | v] it is not: a device's q would be all of q, or of q and k."""
    params, tokens, (loss, _) = whole()
    L, D, columns = params["layers"]["qkv"].shape
    split = np.moveaxis(params["layers"]["qkv"].reshape(L, D, 4, 3, columns // 12), 3, 2)
    roles = split.reshape(L, D, columns)  # the same model's, as [q | k | v]
    mixed = [by_head(part, 4 // m) for part in np.split(roles, m, axis=-1)]
    run = sharded_loss_and_grads(m, False, False)

    def loss_of(qkv):
        with jax.enable_x64(True):
            return float(run(params | {"layers": params["layers"] | {"qkv": qkv}}, tokens)[0])

    np.testing.assert_allclose(loss_of(by_head(roles, 4)), loss, rtol=1e-12)
    wrong = abs(loss_of(np.concatenate(mixed, axis=-1)) - loss)
    assert (wrong > 1e-2) == (m > 1), wrong


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_the_backward_pass_does_not_repeat_a_sum(sequence_parallel):
    """Two sums a layer, and two of their gradients: what is recomputed does not communicate."""
    mesh = meshes.make({"mp": 2}, "")
    params, tokens, _ = whole()
    with jax.enable_x64(True):
        run = sharded_loss_and_grads(2, False, sequence_parallel)
        rows = audit.collectives(run, params, tokens, mesh=mesh)
    kind = "reduce-scatter" if sequence_parallel else "all-reduce"
    tokens_of = 4 * 8 * 16 * 8  # bytes of all activations [4, 8, 16]
    inside = [r for r in rows if r.kind == kind and r.executions == 2 and r.bytes == tokens_of]
    assert len(inside) == 4
    assert not [r for r in inside if "rematted_computation" in r.op_name]


def test_whole_it_names_nothing_so_the_policy_saves_nothing():
    params, tokens = random_params(CONFIG), random_tokens(2, 9)
    fun = functools.partial(transformer.loss, config=CONFIG)
    assert helpers.count_primitive(fun, "name", params, tokens) == 0
    text = jax.jit(jax.grad(fun)).lower(params, tokens).as_text()
    assert "gradaccum" not in text
