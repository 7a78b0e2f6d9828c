"""Splitting, padding, keys and static leaves: properties over the whole space."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum
from gradaccum import _arguments, _microbatch
from gradaccum._arguments import Role, Selection, Static

quick = hypothesis.settings(max_examples=50, deadline=None, derandomize=True)


@quick
@hypothesis.given(
    k=st.integers(1, 9), b=st.integers(1, 9), tail=st.lists(st.integers(1, 3), max_size=2)
)
def test_merge_undoes_split_and_rows_keep_their_order(k, b, tail):
    x = np.arange(k * b * int(np.prod(tail, dtype=int))).reshape(k * b, *tail)
    parts = _microbatch.split(x, k)
    assert parts.shape == (k, b, *tail)
    np.testing.assert_array_equal(_microbatch.merge(parts), x)
    np.testing.assert_array_equal(parts[k - 1], x[-b:])


@quick
@hypothesis.given(size=st.integers(1, 40), multiple=st.integers(1, 17))
def test_pad_batch_repeats_the_last_row_and_masks_it(size, multiple):
    batch = {"x": np.arange(2.0 * size).reshape(size, 2), "scale": 3.0, "name": "a"}
    padded, mask = gradaccum.pad_batch(batch, multiple)
    assert padded["x"].shape[0] % multiple == 0
    assert padded["x"].shape[0] - size < multiple
    np.testing.assert_array_equal(padded["x"][:size], batch["x"])
    assert (padded["x"][size:] == batch["x"][-1:]).all()
    assert mask.dtype == np.float32
    assert mask.sum() == size
    assert (np.sort(mask)[::-1] == mask).all()
    assert (padded["scale"], padded["name"]) == (3.0, "a")


def test_pad_batch_takes_jax_arrays_and_keys():
    batch = {"x": jnp.arange(3), "key": jax.random.split(jax.random.key(0), 3)}
    padded, _ = gradaccum.pad_batch(batch, 4)
    assert isinstance(padded["x"], np.ndarray)
    assert padded["key"].shape == (4,)
    assert (jax.random.key_data(padded["key"])[3] == jax.random.key_data(batch["key"])[2]).all()


@quick
@hypothesis.given(
    size=st.integers(1, 33),
    k=st.sampled_from([1, 2, 4]),
    weights=st.lists(st.integers(0, 1), min_size=33, max_size=33),
)
def test_a_padded_masked_batch_is_exact(size, k, weights):
    x = np.linspace(1.0, 2.0, size).astype(np.float32)
    real = np.asarray(weights[:size], np.float32)
    (x, real), mask = gradaccum.pad_batch((x, real), 8 * k)
    mask = mask * real

    def loss_fn(w, x, mask):
        return jnp.sum(mask * jnp.log(w * x)) / jnp.sum(mask)

    f = masked_mean(k, loss_fn)
    loss, grad = jax.value_and_grad(f)(jnp.float32(2), x, mask)
    kept = x[mask > 0].astype(np.float64)
    want = np.log(2 * kept).mean() if kept.size else 0.0
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(grad, 0.5 if kept.size else 0.0, rtol=1e-5)


@functools.cache
def _mesh():
    return jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))


def masked_mean(k, fun):
    return gradaccum.accumulate(
        fun, microbatches=k, mesh=_mesh(), batch_argnums=(1, 2), weight_fn=lambda x, m: m.sum()
    )


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1, 1, True), (1, True, False), (1, 1.0, False), (0.0, -0.0, False), ("a", "a", True),
        (float("nan"), float("nan"), True), (jnp.sin, jnp.sin, True), (jnp.sin, jnp.cos, False),
    ],
)  # fmt: skip
def test_static_leaves_compare_by_type_and_value(a, b, equal):
    assert (Static(a) == Static(b)) is equal
    if equal:
        assert hash(Static(a)) == hash(Static(b))


def test_static_leaves_without_a_hash_compare_by_identity():
    class Unhashable:
        __hash__ = None

    one, other = Unhashable(), Unhashable()
    assert Static(one) == Static(one)
    assert Static(one) != Static(other)


def test_flatten_and_rebuild_are_inverse():
    fun = lambda params, batch, *, key, flag: None  # noqa: E731
    batch = Selection.of("api", "batch", fun, 1, ())
    args = ({"w": jnp.ones(2), "act": jnp.tanh}, (jnp.ones((4, 1)), jnp.float32(1), None))
    kwargs = {"key": jax.random.key(0), "flag": True}
    form, arrays = _arguments.flatten_call(
        args, kwargs, batch, Selection.of("api", "batch", fun, (), "key")
    )
    assert form.roles == (Role.BROADCAST, Role.BATCH, Role.BROADCAST, Role.KEY)
    assert form.paths(fun) == ["params['w']", "batch[0]", "batch[1]", "key"]
    got_args, got_kwargs = form.rebuild(arrays)
    assert jax.tree.structure((tuple(got_args), got_kwargs)) == jax.tree.structure((args, kwargs))
    assert got_args[0]["act"] is jnp.tanh
    assert got_kwargs["flag"] is True
    assert (
        form
        == _arguments.flatten_call(
            args, kwargs, batch, Selection.of("api", "batch", fun, (), "key")
        )[0]
    )
