"""What must not be done to gradients after the backward pass of a sharded model."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradaccum.tensor_parallel import copy_to, reduce_from

X = np.array([1, 2, 3, 4], np.float32)  # a sequence, of which each of two devices has a half
PARAMS = {"scale": np.float32(1), "bias": np.float32(0.5)}
RIGHT = {"scale": 105, "bias": 10.5}  # the loss is 10.5^2 / 2


def loss(p, x, f=lambda w: w, g=lambda y: y):
    """The scale works on parts of the sequence, the bias on what is whole: both are replicated."""
    return (g(jnp.sum(f(p["scale"]) * x)) + p["bias"]) ** 2 / 2


def gradients(f, after=lambda grads: grads, typed=False):
    mesh = jax.make_mesh((2,), ("mp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    of = functools.partial(loss, f=f, g=lambda y: reduce_from(y, "mp"))
    region = jax.shard_map(
        lambda p, x: jax.tree.map(lambda g: g[None], after(jax.grad(of)(p, x))),
        mesh=mesh,
        in_specs=(P(), P("mp")),
        out_specs=P("mp"),
        check_vma=typed,
    )
    found = jax.jit(region, compiler_options=helpers.COMPILE_FAST)(PARAMS, X)
    return {name: x.tolist() for name, x in found.items()}  # each device's own


def whole(f, **given):
    """Of a gradient that is the same on both devices: one of them."""
    found = gradients(f, **given)
    assert all(a == b for a, b in found.values())
    return {name: a for name, (a, _) in found.items()}


@pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])
def test_t7_each_replicated_gradient_is_summed_where_it_is_in_parts(typed):
    """By copy_to, in the backward pass: nothing is left to reduce over the model axis."""
    assert jax.grad(loss)(PARAMS, X) == RIGHT
    assert whole(lambda w: copy_to(w, "mp"), typed=typed) == RIGHT


def test_t7_one_reduction_of_all_replicated_gradients_is_wrong_for_some():
    """The controls: of what is in parts a sum is right, of what is whole a mean."""
    none = lambda w: w  # noqa: E731
    assert gradients(none) == {"scale": [31.5, 73.5], "bias": [10.5, 10.5]}
    for reduce, wrong in (
        (jax.lax.psum, {"bias": 2 * 10.5}),
        (jax.lax.pmean, {"scale": 105 / 2}),
    ):
        after = functools.partial(reduce, axis_name="mp")
        assert whole(none, after=after) == RIGHT | wrong
