"""How vocab-parallel cross entropies go wrong, each fault beside the right value; and the errors.

One target on the second of two devices. With a local maximum alone its loss is 3.43, with the
target's index clipped into each shard 9.33; it is 5.06.
"""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradaccum.tensor_parallel import cross_entropy, gather_from, reduce_from

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)
modes = pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])

LOGITS = np.array([[4.94, 0.67, 0.0, 2.7]], np.float32)
TARGET = np.array([2])
RIGHT = 5.06
WHOLE, COLUMNS = P(), P(None, "mp")


def run(fun, *args, in_specs=(COLUMNS, WHOLE), out_specs=WHOLE, typed=False, m=2):
    axis = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:m]}
    options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": typed}
    return jit(jax.shard_map(fun, mesh=jax.make_mesh((m,), ("mp",), **axis), **options))(*args)


def over_mp(x):
    return reduce_from(x, "mp")


def global_maximum(logits):
    return jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), "mp")


def masked(logits, ids):
    return jnp.sum(jnp.where(ids[:, None] == jnp.arange(logits.shape[-1])[None], logits, 0), -1)


def taken(logits, ids):
    return jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]


def clipped(logits, ids):
    return taken(logits, jnp.clip(ids, 0, logits.shape[-1] - 1))


def by_hand(logits, targets, maximum=global_maximum, pick=masked, total=over_mp):
    """The textbook form, as the second seed has it; the faults below are other parts for it."""
    ids = targets - jax.lax.axis_index("mp") * logits.shape[-1]
    shifted = logits - maximum(logits)[:, None]
    log_sum = jnp.log(total(jnp.sum(jnp.exp(shifted), axis=-1)))
    return log_sum - total(pick(shifted, ids))


def loss_of(loss_fn, logits=LOGITS, **options):
    loss = run(loss_fn, logits, TARGET, out_specs=P("mp"), **options)  # each device's own
    assert np.array_equal(loss, np.broadcast_to(loss[:1], loss.shape), equal_nan=True)
    return round(float(loss[0]), 2)


def ours(logits, targets, **options):
    return cross_entropy(logits, targets, "mp", **options)


@modes
def test_the_right_value(typed):
    losses = run(ours, LOGITS, TARGET, typed=typed)
    whole = np.log(np.sum(np.exp(LOGITS.astype(float)))) - LOGITS[0, TARGET[0]]
    np.testing.assert_allclose(losses, [whole], rtol=1e-6)
    assert round(float(losses[0]), 2) == loss_of(by_hand) == RIGHT


def test_c1_a_local_maximum_alone():
    wrong = functools.partial(by_hand, maximum=lambda x: jnp.max(x, axis=-1))
    assert loss_of(wrong) == 3.43
    assert loss_of(ours) == RIGHT


@modes
def test_c2_large_logits(typed):
    large = LOGITS + np.float32(200)
    assert loss_of(functools.partial(by_hand, maximum=lambda x: jnp.zeros(1)), large) == np.inf
    losses, grads = run(
        jax.value_and_grad(lambda x, t: ours(x, t)[0]),
        large, TARGET, out_specs=(P(), COLUMNS), typed=typed,
    )  # fmt: skip
    np.testing.assert_allclose(losses, RIGHT, atol=5e-3)
    np.testing.assert_allclose(grads.sum(), 0, atol=1e-6)


@modes
def test_c3_the_maximum_is_not_differentiated(typed):
    def outside(logits):
        return jax.lax.stop_gradient(jax.lax.pmax(jnp.max(logits, axis=-1), "mp"))

    def gradient(loss_fn):
        fun = jax.grad(lambda x, t: loss_fn(x, t)[0])
        return run(fun, LOGITS, TARGET, out_specs=COLUMNS, typed=typed)

    with pytest.raises(NotImplementedError, match="pmax"):
        gradient(functools.partial(by_hand, maximum=outside))
    softmax = np.exp(LOGITS) / np.exp(LOGITS).sum()
    np.testing.assert_allclose(gradient(ours), softmax - np.eye(4)[TARGET], atol=1e-6)


def test_c4_a_target_on_another_shard():
    assert np.isnan(loss_of(functools.partial(by_hand, pick=taken)))
    assert loss_of(functools.partial(by_hand, pick=clipped)) == 9.33
    assert loss_of(ours) == RIGHT


@modes
def test_c6_shards_without_the_target_have_gradients_too(typed):
    def owner_alone(logits, targets):
        owns = targets // logits.shape[-1] == jax.lax.axis_index("mp")
        return over_mp(jnp.where(owns, by_hand(logits, targets), 0))

    def gradient(loss_fn, typed):
        fun = jax.grad(lambda x, t: loss_fn(x, t)[0])
        return run(fun, LOGITS, TARGET, out_specs=COLUMNS, typed=typed)

    softmax = np.exp(LOGITS) / np.exp(LOGITS).sum()
    wrong = gradient(owner_alone, False)
    np.testing.assert_array_equal(wrong[:, :2], 0)
    np.testing.assert_allclose(wrong[:, 2:], (softmax - np.eye(4)[TARGET])[:, 2:], atol=1e-6)
    np.testing.assert_allclose(gradient(ours, typed), softmax - np.eye(4)[TARGET], atol=1e-6)


def test_t1_a_plain_psum_makes_gradients_m_times_too_large():
    """T1, untyped: the loss is right."""
    plain = functools.partial(by_hand, total=lambda x: jax.lax.psum(x, "mp"))
    fun = jax.value_and_grad(lambda x, t: plain(x, t)[0])
    loss, grads = run(fun, LOGITS, TARGET, out_specs=(P(), COLUMNS))
    softmax = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert round(float(loss), 2) == RIGHT
    np.testing.assert_allclose(grads, 2 * (softmax - np.eye(4)[TARGET]), atol=1e-6)


@pytest.mark.parametrize("m", [2, 4])
def test_c8_gathered_logits_add_log_m_and_vocab_size_sees_it(m):
    def gathered(logits, targets, **options):
        return ours(gather_from(logits, "mp"), targets, **options)

    loss = run(gathered, LOGITS, TARGET, m=m)
    np.testing.assert_allclose(loss - run(ours, LOGITS, TARGET, m=m), np.log(m), rtol=1e-5)
    with pytest.raises(ValueError, match="cross_entropy") as caught:
        run(functools.partial(gathered, vocab_size=4), LOGITS, TARGET, m=m)
    assert str(caught.value) == (
        f"cross_entropy: got logits with 4 columns on each of {m} devices, {4 * m} in all, for "
        "vocab_size=4: one device has all of it. Give this device's columns, before any gather; or "
        "leave out vocab_size if it is not the whole one."
    )
    # Where types are checked it is seen without a vocab_size.
    with pytest.raises(ValueError, match="cross_entropy") as caught:
        run(gathered, LOGITS, TARGET, m=m, typed=True)
    assert str(caught.value) == (
        "cross_entropy: got logits with shape (1, 4) that is the same on all devices of mp, needed "
        "this device's columns of the vocabulary. Split it over that axis in the in_specs of the "
        "shard_map."
    )


def test_t16_a_vocabulary_that_m_does_not_divide():
    """Padded with anything, masked by vocab_size; without it the padding counts."""
    padded = np.append(LOGITS, np.full((1, 2), 4.94, np.float32), axis=1)
    assert loss_of(ours, padded) == 6.08
    assert loss_of(functools.partial(ours, vocab_size=4), padded) == RIGHT
    with pytest.raises(ValueError, match="cross_entropy") as caught:
        run(functools.partial(ours, vocab_size=7), padded, TARGET)
    assert str(caught.value) == (
        "cross_entropy: got logits with 3 columns on each of 2 devices, 6 in all, for "
        "vocab_size=7. Pad the vocabulary to 8: 4 columns a device."
    )


# --- Errors --------------------------------------------------------------------------------------


def message_of(error, logits=LOGITS, targets=TARGET, axis_name="mp", typed=False, **options):
    def fun(logits, targets):
        return cross_entropy(logits, targets, axis_name, **options)

    spec = P(*(None,) * (np.ndim(logits) - 1), "mp")
    with pytest.raises(error) as caught:
        run(fun, logits, targets, in_specs=(spec, P()), typed=typed)
    return str(caught.value)


def test_axes():
    assert message_of(ValueError, axis_name="tp").startswith(
        "cross_entropy: got axis_name='tp', needed a manual axis of the mesh or a tuple of "
        "different ones; manual here: mp=2. Call it inside a jax.shard_map over that axis"
    )
    assert "got axis_name=('mp', 'mp'), needed" in message_of(ValueError, axis_name=("mp", "mp"))
    assert "got axis_name=(), needed" in message_of(ValueError, axis_name=())
    with pytest.raises(ValueError, match=r"cross_entropy: got axis_name='mp'.*no axis is manual"):
        cross_entropy(LOGITS, TARGET, "mp")


def test_dtypes():
    assert message_of(TypeError, logits=LOGITS.astype(np.int32)) == (
        "cross_entropy: got logits of dtype int32, needed floats."
    )
    assert message_of(TypeError, logits=LOGITS.astype(np.complex64)) == (
        "cross_entropy: got logits of dtype complex64, needed floats."
    )
    assert message_of(TypeError, targets=TARGET.astype(np.float32)) == (
        "cross_entropy: got targets of dtype float32, needed integers: global ids."
    )
    assert "targets of dtype bool, needed" in message_of(TypeError, targets=TARGET > 0)
    assert message_of(TypeError, where=np.ones(1, np.float32)) == (
        "cross_entropy: got where of dtype float32, needed booleans; to weigh targets, multiply "
        "the returned losses."
    )


def test_shapes():
    assert message_of(ValueError, targets=np.eye(4, dtype=np.int32)[:1]) == (
        "cross_entropy: got logits (1, 2) and targets (1, 4), needed logits [..., V/m], this "
        "device's columns, and targets [...], one id each."
    )
    assert "got logits (1, 2) and targets (), needed" in message_of(ValueError, targets=TARGET[0])
    assert message_of(ValueError, where=np.ones((3, 1), bool)) == (
        "cross_entropy: where has shape (3, 1), which does not broadcast to the targets' (1,). "
        "Give one boolean a target."
    )


def test_a_scalar_has_no_columns():
    with pytest.raises(ValueError, match=r"cross_entropy: got logits \(\) and targets \(\)"):
        run(lambda x, t: ours(x[0, 0], t[0]), LOGITS, TARGET)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.1", None, 1j], ids=repr)
@pytest.mark.parametrize("name", ["label_smoothing", "z_loss"])
def test_numbers(name, value):
    limit = "it must be a number >= 0" + (" and <= 1." if "label" in name else ", and finite.")
    message = message_of(ValueError, **{name: value})
    assert message == f"cross_entropy: {name} is {value!r}; {limit}"


def test_smoothing_is_at_most_one_and_no_tracer():
    assert "label_smoothing is 1.5; it must be" in message_of(ValueError, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"cross_entropy: z_loss is .*; it must be a number >= 0"):
        run(lambda x, t: ours(x, t, z_loss=x[0, 0]), LOGITS, TARGET)


@pytest.mark.parametrize("value", [0, -4, 2.5, "4"], ids=repr)
def test_vocab_size(value):
    message = message_of(ValueError, vocab_size=value)
    assert message == f"cross_entropy: vocab_size is {value!r}; it must be an int >= 1."
