"""Every error names what it got, what it needs and the remedy, before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from optax.microbatching import AccumulationType as Kind

import gradaccum


def loss_fn(params, batch):
    return jnp.mean(batch["x"] @ params)


def decorate(fun=loss_fn, **options):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    return gradaccum.accumulate(fun, **({"microbatches": 4, "mesh": mesh} | options))


DECORATION = {
    "k = 0": ({"microbatches": 0}, ValueError, "microbatches is 0; it must be >= 1"),
    "k negative": ({"microbatches": np.int32(-2)}, ValueError, "microbatches is -2"),
    "k float": ({"microbatches": 2.0}, TypeError, r"microbatches is 2\.0; it must be an int"),
    "k bool": ({"microbatches": True}, TypeError, "microbatches is True"),
    "unroll": ({"unroll": 0}, ValueError, "unroll is 0; it must be >= 1"),
    "reduction": ({"loss_reduction": "max"}, ValueError, "'max'; it must be 'mean' or 'sum'"),
    "sum and weights": (
        {"loss_reduction": "sum", "weight_fn": lambda b: 1.0},
        ValueError,
        "weight_fn given with loss_reduction='sum'",
    ),
    "accumulator dtype": (
        {"accumulator_dtype": jnp.int32},
        TypeError,
        "accumulator_dtype is .*int32.*; it must be a floating dtype",
    ),
    "complex accumulator": (
        {"accumulator_dtype": jnp.complex64},
        TypeError,
        "accumulator_dtype is .*complex64.*; it must be a floating dtype",
    ),
    "weight_fn kind": ({"weight_fn": 3}, TypeError, "weight_fn is 3; it must be a function"),
    "a loss without a hash": (
        {"fun": type("Loss", (), {"__call__": loss_fn, "__hash__": None})()},
        TypeError,
        "the loss, a Loss, has no hash. Decorate a function that takes it as an argument",
    ),
    "reduce dtype": ({"reduce_dtype": "nonsense"}, TypeError, "reduce_dtype is 'nonsense'"),
    "aux kind": (
        {"has_aux": True, "aux_accumulator": {"a": "mean", "b": Kind.SUM}},
        TypeError,
        "aux_accumulator holds 'mean'; its leaves must be optax.microbatching.AccumulationType",
    ),
    "aux without": ({"aux_accumulator": Kind.SUM}, ValueError, "but has_aux is False"),
    "fused": ({"fused": "no"}, TypeError, "fused is 'no'; it must be a bool"),
    "axis kind": ({"axis_name": 3}, ValueError, "axis_name is 3; it must be a mesh axis's name"),
    "axis twice": ({"axis_name": ("dp", "dp")}, ValueError, "a tuple of different ones"),
    "mesh kind": ({"mesh": "dp"}, TypeError, "mesh is 'dp'; it must be a jax.sharding.Mesh"),
    "argnums kind": ({"batch_argnums": "x"}, TypeError, "batch_argnums must be ints .* got .'x',."),
    "argnums twice": (
        {"batch_argnums": (1, 1)},
        ValueError,
        r"batch_argnums=\(1, 1\) .* names an argument twice",
    ),
    "argnums too large": (
        {"batch_argnums": (1, 2)},
        ValueError,
        r"2 in batch_argnums or batch_argnames is no parameter of loss_fn\(params, batch\)\. Give "
        r"positions from 0 to 1, or names of these\.",
    ),
    "argnames": (
        {"batch_argnames": "typo"},
        ValueError,
        "'typo' in batch_argnums or batch_argnames",
    ),
    "key argnames": ({"key_argnames": "typo"}, ValueError, "'typo' in key_argnums or key_argnames"),
    "no function": ({"fun": 3}, TypeError, r"3 is not a function of \(params, batch"),
}


@pytest.mark.parametrize("name", DECORATION)
def test_at_decoration(name):
    options, error, message = DECORATION[name]
    with pytest.raises(error, match=f"^accumulate: .*{message}"):
        decorate(**options)


def rows(n, *shape):
    return jnp.ones((n, *shape))


P4 = jnp.ones((4,))
CALLS = {
    "not divisible, every leaf": (
        {},
        (P4, {"x": rows(30, 4), "tokens": rows(30, 128)}),
        ValueError,
        r"batch\['tokens'\] has shape \(30, 128\), batch\['x'\] has shape \(30, 4\); axis 0 \(30\) "
        r"is not divisible by microbatches \* data devices = 4 \* 8 = 32. "
        r"Pad the batch with gradaccum.pad_batch\(batch, 32\).",
    ),
    "k larger than the local batch": (
        {"microbatches": 16},
        (P4, {"x": rows(64, 4)}),
        ValueError,
        r"axis 0 \(64\) is not divisible by microbatches \* data devices = 16 \* 8 = 128\. Pad .*, "
        r"or take a number of microbatches that divides 8: 1, 2, 4, 8\.",
    ),
    "empty batch": ({}, (P4, {"x": rows(0, 4)}), ValueError, r"\(0, 4\): the batch is empty"),
    "leading sizes": (
        {},
        (P4, {"x": rows(32, 4), "y": rows(64)}),
        ValueError,
        r"leading sizes of the batch disagree: batch\['x'\] has 32, batch\['y'\] has 64",
    ),
    "no batch": (
        {"fun": lambda p, b, c=None: jnp.mean(b["x"]), "batch_argnums": 2},
        (P4, {"x": rows(32, 4)}),
        ValueError,
        r"no batch to split: the call's 2 arguments \(0, 1\) have no array of rank >= 1",
    ),
    "rank-0 batch": ({}, (P4, {"x": 3.0}), ValueError, "no batch to split"),
    "not a scalar": (
        {"fun": lambda p, b: b["x"]},
        (P4, {"x": rows(32, 4)}),
        TypeError,
        r"must be a real scalar, got one of shape \(1, 4\) and dtype float32",
    ),
    "integer loss": (
        {"fun": lambda p, b: jnp.int32(1)},
        (P4, {"x": rows(32, 4)}),
        TypeError,
        r"must be a real scalar, got one of shape \(\) and dtype int32",
    ),
    "complex loss": (
        {"fun": lambda p, b: jnp.complex64(1)},
        (P4, {"x": rows(32, 4)}),
        TypeError,
        "and dtype complex64",
    ),
    "no loss": (
        {"fun": lambda p, b: None},
        (P4, {"x": rows(32, 4)}),
        TypeError,
        "must be a real scalar, got a NoneType",
    ),
    "aux without has_aux": (
        {"fun": lambda p, b: (jnp.mean(b["x"]), {})},
        (P4, {"x": rows(32, 4)}),
        TypeError,
        "returned a tuple of 2; give has_aux=True",
    ),
    "has_aux without aux": (
        {"has_aux": True},
        (P4, {"x": rows(32, 4)}),
        TypeError,
        r"has_aux=True, but the loss function returned an array of shape \(\)",
    ),
    "aux structure": (
        {
            "fun": lambda p, b: (jnp.mean(b["x"]), {"a": 1.0, "b": 2.0}),
            "has_aux": True,
            "aux_accumulator": {"a": Kind.SUM},
        },
        (P4, {"x": rows(32, 4)}),
        ValueError,
        "aux_accumulator is not a prefix of aux: it is .*'a'.*, aux is .*'b'",
    ),
    "mean of integers": (
        {"fun": lambda p, b: (jnp.mean(b["x"]), {"n": jnp.int32(1)}), "has_aux": True},
        (P4, {"x": rows(32, 4)}),
        TypeError,
        r"aux\['n'\] \(int32\) cannot be averaged. Give aux_accumulator SUM",
    ),
    "weight shape": (
        {"weight_fn": lambda batch: batch["x"].sum(0)},
        (P4, {"x": rows(32, 4)}),
        TypeError,
        r"weight_fn must return one real scalar >= 0 a microbatch, got an array of shape \(4,\)",
    ),
    "forgotten batch argument": (
        {"fun": lambda p, b, y: jnp.mean(b["x"] @ p)},
        (P4, {"x": rows(32, 4)}, rows(32)),
        ValueError,
        r"y has shape \(32,\): axis 0 is the batch's, B = 32, but it is not named in batch_argnums",
    ),
    "unnamed key": (
        {"fun": lambda p, b, key: jnp.mean(b["x"] @ p)},
        (P4, {"x": rows(32, 4)}, jax.random.key(0)),
        ValueError,
        r"key: a PRNG key that every microbatch and device would share.*key_argnums=\(\)",
    ),
    "unnamed key beside a named one": (
        {"fun": lambda p, b, r, s: jnp.mean(b["x"] @ p), "key_argnums": 2},
        (P4, {"x": rows(32, 4)}, jax.random.key(0), jax.random.key(1)),
        ValueError,
        "s: a PRNG key that every microbatch",
    ),
    "a named key that is none": (
        {"fun": lambda p, b, r: jnp.mean(b["x"] @ p), "key_argnums": 2},
        (P4, {"x": rows(32, 4)}, jnp.ones(3)),
        ValueError,
        "key_argnums or key_argnames names 2, which holds no PRNG key",
    ),
    "a weight that communicates": (
        {"weight_fn": lambda b: jax.lax.psum(b["x"].sum(), "dp")},
        (P4, {"x": rows(32, 4)}),
        ValueError,
        r"weight_fn communicates over the data axis dp \(psum\). Return this device's own count",
    ),
    "sync statistics with weights": (
        {
            "fun": lambda p, b: jax.lax.pmean(jnp.mean(b["x"] @ p), "dp"),
            "weight_fn": lambda b: 1.0,
        },
        (P4, {"x": rows(32, 4)}),
        ValueError,
        "communicates over the data axis dp .* a device that skips a microbatch of weight 0",
    ),
}


@pytest.mark.parametrize("how", ["grad", "call", "value_and_grad"])
@pytest.mark.parametrize("name", CALLS)
def test_at_the_call(name, how):
    options, args, error, message = CALLS[name]
    f = decorate(**options)
    has_aux = options.get("has_aux", False)
    run = {
        "grad": jax.jit(jax.grad(f, has_aux=has_aux)),
        "call": f,
        "value_and_grad": f.value_and_grad(),
    }[how]
    with pytest.raises(error, match=f"^accumulate: .*{message}"):
        run(*args)


@pytest.mark.parametrize(
    ("size", "k", "numbers"),
    [
        pytest.param(10, 1, r"axis 0 \(10\) .* = 1 \* 8 = 8. .*pad_batch\(batch, 8\)", id="b1"),
        pytest.param(16, 4, r"axis 0 \(16\) .* = 4 \* 8 = 32. .*pad_batch\(batch, 32\)", id="b3"),
    ],
)
def test_b1_b3_a_batch_that_does_not_divide_is_named_with_n_and_k(size, k, numbers):
    """10 rows on 8 devices; 2 rows a device in 4 microbatches, each of which would be empty."""
    with pytest.raises(ValueError, match=numbers):
        jax.grad(decorate(microbatches=k))(P4, {"x": rows(size, 4)})


def test_a_local_batch_is_divided_by_k_alone():
    f = gradaccum.accumulate(loss_fn, microbatches=4, axis_name=None)
    with pytest.raises(ValueError, match=r"microbatches \* data devices = 4 \* 1 = 4"):
        f(P4, {"x": rows(30, 4)})


def test_nothing_of_the_loss_runs_before_the_checks():
    def fails(params, batch):
        raise AssertionError("the loss was traced")

    with pytest.raises(ValueError, match="is not divisible"):
        decorate(fails)(P4, {"x": rows(30, 4)})


def test_validation_stays_when_chex_is_switched_off():
    import chex

    chex.disable_asserts()
    try:
        with pytest.raises(ValueError, match="is not divisible"):
            decorate()(P4, {"x": rows(30, 4)})
    finally:
        chex.enable_asserts()


def test_a_parameter_of_leading_size_b_is_no_forgotten_batch():
    f = decorate(lambda p, b: jnp.mean(b["x"]) * p.sum())
    assert float(f(rows(32), {"x": rows(32, 4)})) == 32
    assert jax.grad(f)(rows(32), {"x": rows(32, 4)}).shape == (32,)


@pytest.mark.parametrize(
    ("batch", "multiple", "message"),
    [
        pytest.param({"x": np.ones(3)}, 0, "multiple is 0; it must be an int >= 1", id="zero"),
        pytest.param({"x": np.ones(3)}, 4.0, r"multiple is 4\.0; it must be an int", id="float"),
        pytest.param({"x": np.ones((0, 3))}, 4, r"are \[0\]; all must be one size", id="empty"),
        pytest.param({"x": np.ones(3), "y": np.ones(4)}, 4, r"are \[3, 4\]", id="disagree"),
        pytest.param({"x": 1.0}, 4, r"are \[\]", id="no rows"),
    ],
)
def test_pad_batch(batch, multiple, message):
    with pytest.raises(ValueError, match=f"^pad_batch: .*{message}"):
        gradaccum.pad_batch(batch, multiple)
