"""`cross_entropy` over a sharded vocabulary equals the unsharded one, in values and gradients."""

import functools

import helpers
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cross_entropy_reference import (
    COLUMNS,
    LOGITS,
    PADDED,
    TARGETS,
    V,
    losses_and_gradient,
    reference,
    sharded,
    weighed,
)
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from layouts import jit
from model_axis import mesh_of, modes

from gradaccum.tensor_parallel import cross_entropy

IGNORED = {  # for each dtype, what is no id of V columns
    "int8": [-1, -100, 127],
    "int16": [-1, -100, 2**15 - 1],
    "int32": [-1, -(2**31), 2**31 - 1],
    "int64": [-1, -100, V],
    "uint8": [V, 128, 255],
    "uint16": [V, 2**15, 2**16 - 1],
    "uint32": [V, 2**31, 2**32 - 1],
    "uint64": [V, 2**32, 2**64 - 1],
}
WHERE = {
    "none": None,
    "each": np.array([[True, False, True], [True, True, False]]),
    "columns": np.array([[True, False, True]]),
    "rows": np.array([[False], [True]]),
    "last": np.array([False, True, True]),
    "all false": False,
}
CASES = helpers.pairwise({
    "m": [1, 2, 4],
    "typed": [False, True],
    "dtype": ["bfloat16", "float16", "float32", "float64"],
    "ignored": [False, True],
    "where": list(WHERE),
    "label_smoothing": [0.0, 0.1, 1],
    "z_loss": [0.0, 0.01],
    "vocab_size": [None, PADDED],
})  # fmt: skip


def ignore(targets, ids):
    """Returns the targets in this dtype, some of them none of the vocabulary's."""
    targets = targets.astype(ids)
    targets[[0, 1, 1], [0, 0, 2]] = np.array(IGNORED[ids], ids)
    return targets


def check(got, want, dtype, columns=V):
    (losses, grads), (want_losses, want_grads) = got, want
    wide = "float64" if dtype == "float64" else "float32"
    assert (losses.dtype, grads.dtype) == (wide, dtype)
    helpers.assert_close(losses, want_losses)
    helpers.assert_close(grads, want_grads)
    np.testing.assert_array_equal(losses[want_losses == 0], 0)
    np.testing.assert_array_equal(grads[want_losses == 0], 0)
    np.testing.assert_array_equal(grads[..., columns:], 0)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_losses_and_gradients_are_the_unsharded_ones(case):
    case = dict(case)
    m, typed, dtype, ignored = (case.pop(name) for name in list(case)[:4])
    case["where"] = WHERE[case["where"]]
    targets = ignore(TARGETS, "int32") if ignored else TARGETS
    with jax.enable_x64(dtype == "float64"):
        logits = jnp.asarray(LOGITS).astype(dtype)
        got = losses_and_gradient(logits, targets, m, typed, **case)
    check(got, reference(logits, targets, **case), dtype, case["vocab_size"] or V)


@pytest.mark.parametrize("ids", IGNORED)
def test_targets_of_every_integer_dtype(ids):
    targets = ignore(TARGETS, ids)
    logits = LOGITS.astype(np.float32)
    with jax.enable_x64(ids in ("int64", "uint64")):
        got = losses_and_gradient(logits, targets)
    want = reference(logits, targets)
    assert [bool(x) for x in want[0].ravel() == 0] == [True, False, False, True, False, True]
    check(got, want, "float32")


def test_the_cases_hold_what_is_ignored_and_what_is_not():
    """The table above would pass empty: targets of every kind stand in it, beside counted ones."""
    kinds = {(c["ignored"], c["where"]) for c in CASES}
    assert len(kinds) == 2 * len(WHERE)
    losses, grads = reference(LOGITS, TARGETS, vocab_size=PADDED)
    assert [bool(x) for x in losses.ravel() == 0] == [t >= PADDED for t in TARGETS.ravel()]
    assert np.all(grads[losses != 0][:, :PADDED])


@hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],  # each step of shrinking a failure compiles a program
)
@hypothesis.given(data=st.data())
def test_random_shapes_masks_and_options(data):
    m = data.draw(st.sampled_from([1, 2, 4]), "m")
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3), "shape"))
    columns = m * data.draw(st.integers(1, 4), "columns on a device")
    padding = st.none() | st.integers(columns // m + 1, columns) if m > 1 else st.none()
    options = {
        "vocab_size": data.draw(padding, "vocab_size"),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.25, 1.0]), "label_smoothing"),
        "z_loss": data.draw(st.sampled_from([0.0, 0.5]), "z_loss"),
    }
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    logits = rng.normal(size=(*shape, columns)).astype(np.float32) * 10
    targets = rng.integers(-2, columns + 2, shape)
    where = rng.random(shape) < 0.7
    weights = rng.normal(size=shape).astype(np.float32)

    def fun(logits, where):
        def loss(logits):
            losses = cross_entropy(logits, targets, "mp", where=where, **options)
            return jnp.sum(losses * weights), losses

        grads, losses = jax.grad(loss, has_aux=True)(logits)
        return losses, grads

    spec = P(*(None,) * len(shape), "mp")
    typed = data.draw(st.booleans(), "typed")
    got = jit(sharded(fun, (spec, P()), (P(), spec), m, typed))(logits, where)
    want = reference(logits, targets, where, weights=weights, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@modes
def test_two_axes_are_one_vocabulary(typed):
    def fun(logits, targets):
        loss_fn = functools.partial(cross_entropy, targets=targets, axis_name=("b", "a"))
        grads, losses = jax.grad(weighed, has_aux=True)(logits, loss_fn)
        return losses, grads

    spec, mesh = P(None, None, ("b", "a")), mesh_of(2, 2, names=("a", "b"))
    specs = {"in_specs": (spec, P()), "out_specs": (P(), spec), "check_vma": typed}
    got = jit(jax.shard_map(fun, mesh=mesh, **specs))(LOGITS.astype(np.float32), TARGETS)
    helpers.assert_close(got, reference(LOGITS.astype(np.float32), TARGETS), "float32")


@modes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38], ids=str)
def test_logits_of_ignored_targets_and_of_padding_may_be_anything(typed, bad):
    targets = TARGETS.copy()
    targets[0, 0], targets[1, 1] = -1, V
    where = WHERE["columns"]
    logits = LOGITS.astype(np.float32)
    clean = reference(logits, targets, where=where, vocab_size=PADDED, z_loss=0.1)
    logits[clean[0] == 0] = bad
    logits[..., PADDED:] = bad
    options = {"where": where, "vocab_size": PADDED, "z_loss": 0.1}
    got = losses_and_gradient(logits, targets, 4, typed, **options)
    helpers.assert_close(got, clean, "float32")


def test_a_mask_after_the_loss_would_keep_nan_in_the_gradient():
    """The control of the test above, unsharded: N4's kind."""
    logits = LOGITS[0, :2].astype(np.float32)
    logits[0] = np.nan

    def masked(logits):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, np.array([1, 2]))
        return jnp.sum(jnp.where(np.array([False, True]), losses, 0))

    loss, grads = jit(jax.value_and_grad(masked))(logits)
    assert np.isfinite(loss)
    assert np.isnan(grads[0]).all()


def test_lists_are_arrays():
    def fun(logits):
        return cross_entropy(logits, TARGETS.tolist(), "mp", where=[[True], [False]])

    logits = LOGITS.astype(np.float32)
    want = reference(logits, TARGETS, where=np.array([[True], [False]]))
    helpers.assert_close(jit(sharded(fun, (COLUMNS,), P()))(logits), want[0], "float32")
