"""`stack` and `unstack`: inverse of each other, and what the second seed's modules make."""

import haiku as hk
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import numbers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import jit

from gradaccum.tensor_parallel import stack, unstack

TREE = {
    "embedding": {"table": numbers(8, 3)},
    "dense": [numbers(3, 8), numbers(8), numbers(2, 4, 3)],
    "bias": numbers(3),
    "scale": np.float32(2),
}
SPECS = {
    "embedding": P("mp"),  # a prefix
    "dense": [P(None, "mp"), P("mp"), P(None, "mp", None)],
    "bias": None,
    "scale": P(),
}
LOCAL = {
    "embedding": {"table": (2, 3)},
    "dense": [(3, 2), (2,), (2, 1, 3)],
    "bias": (3,),
    "scale": (),
}


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (np.shape(b), b.dtype)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_unstack_is_the_inverse_of_stack(m):
    assert_same(unstack(stack(TREE, SPECS, "mp", m), SPECS, "mp"), TREE)


def test_stack_is_the_inverse_of_unstack():
    shapes, structure = jax.tree.flatten(LOCAL, is_leaf=lambda x: isinstance(x, tuple))
    rng = np.random.default_rng(0)
    local = jax.tree.unflatten(
        structure, [rng.normal(size=(4, *s)).astype(np.float32) for s in shapes]
    )
    local["bias"][:], local["scale"][:] = local["bias"][:1], local["scale"][:1]
    whole = unstack(local, SPECS, "mp")
    assert jax.tree.map(jnp.shape, whole) == jax.tree.map(np.shape, TREE)
    assert_same(stack(whole, SPECS, "mp", 4), local)


def test_a_device_has_what_shard_map_gives_it():
    """Device i's part of the stack is what lies on it where the array is placed by its spec."""
    axis = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:4]}
    mesh = jax.make_mesh((4,), ("mp",), **axis)
    stacked = stack(TREE, SPECS, "mp", 4)
    specs = {**SPECS, "embedding": {"table": P("mp")}, "bias": P()}
    leaves = zip(
        jax.tree.leaves(TREE),
        jax.tree.leaves(stacked),
        jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)),
        strict=True,
    )
    for whole, parts, spec in leaves:
        placed = jax.device_put(whole, NamedSharding(mesh, spec))
        for shard in placed.addressable_shards:
            i = mesh.devices.tolist().index(shard.device)
            np.testing.assert_array_equal(shard.data, parts[i])


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")], ids="-".join)
def test_two_axes(names):
    """The first is the slowest, as a PartitionSpec has it; another behind them is left alone."""
    tree = {"w": numbers(3, 8), "b": numbers(2), "v": numbers(16)}
    specs = {"w": P(None, names), "b": P("fsdp"), "v": P((*names, "fsdp"))}
    stacked = stack(tree, specs, names, 4)
    assert jax.tree.map(jnp.shape, stacked) == {"w": (4, 3, 2), "b": (4, 2), "v": (4, 4)}
    np.testing.assert_array_equal(stacked["w"][1], tree["w"][:, 2:4])
    np.testing.assert_array_equal(stacked["v"][3], tree["v"][12:])
    assert_same(unstack(stacked, specs, names), tree)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool", "complex64"])
def test_dtypes(dtype):
    tree = {"w": jnp.asarray(numbers(4, 2) % 3).astype(dtype), "b": jnp.ones(3, dtype)}
    specs = {"w": P("mp"), "b": None}
    assert_same(unstack(stack(tree, specs, "mp", 2), specs, "mp"), tree)


def test_keys():
    """Typed keys, split and replicated; copies that differ are keys that differ."""
    keys = {"each": jax.random.split(jax.random.key(0), 4), "shared": jax.random.key(1)}
    specs = {"each": P("mp"), "shared": P()}
    stacked = stack(keys, specs, "mp", 2)
    assert jax.tree.map(jnp.shape, stacked) == {"each": (2, 2), "shared": (2,)}
    got = unstack(stacked, specs, "mp")
    assert_same(*(jax.tree.map(jax.random.key_data, x) for x in (got, keys)))
    with pytest.raises(ValueError, match=r"the copies of \['each'\] differ"):
        unstack(stacked, None, "mp")


def test_one_leaf_and_an_empty_tree():
    assert_same(stack(numbers(4), P("mp"), "mp", 2), numbers(2, 2))
    assert_same(unstack(numbers(2, 2), P("mp"), "mp"), numbers(4))
    assert (stack({}, {}, "mp", 2), unstack([], None, "mp")) == ({}, [])


def test_under_jit_and_eval_shape():
    there = jit(lambda t: stack(t, SPECS, "mp", 4))
    back = jit(lambda t: unstack(t, SPECS, "mp"))
    assert_same(back(there(TREE)), TREE)
    shapes = jax.eval_shape(there, TREE)
    local = jax.tree.map(lambda s: (4, *s), LOCAL, is_leaf=lambda x: isinstance(x, tuple))
    assert jax.tree.map(lambda x: x.shape, shapes) == local


# --- What the second seed's modules make ---------------------------------------------------------

IN, HIDDEN, M = 3, 8, 4


class FeedForward(hk.Module):
    """The seed's: each shard makes its own columns and rows, and adds the bias of its own."""

    def __init__(self, shards, b_init=None):
        super().__init__()
        self.up = hk.Linear(HIDDEN // shards)
        self.down = hk.Linear(IN, b_init=b_init)
        self.whole = shards == 1

    def __call__(self, x):
        y = self.down(jnp.tanh(self.up(x)))
        return y if self.whole else jax.lax.psum(y, "mp")


HAIKU_SPECS = {
    "feed_forward/~/linear": {"w": P(None, "mp"), "b": P("mp")},
    "feed_forward/~/linear_1": {"w": P("mp"), "b": P()},
}
X = helpers.normal(0, 2, IN).astype(np.float32)


def forward(shards, **options):
    return hk.without_apply_rng(hk.transform(lambda x: FeedForward(shards, **options)(x)))


def initialised(keys, **options):
    return jax.vmap(forward(M, **options).init, (0, None), axis_name="mp")(keys, X)


def test_haiku_modules_initialised_by_vmap():
    """[m, *local] leaves become the whole model's, which gives what the shards together give."""
    shards = initialised(jax.random.split(jax.random.key(0), M))
    local = {"w": (M, IN, HIDDEN // M), "b": (M, HIDDEN // M)}
    assert jax.tree.map(jnp.shape, shards)["feed_forward/~/linear"] == local
    whole = unstack(shards, HAIKU_SPECS, "mp")
    wanted = jax.eval_shape(forward(1).init, jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, whole) == jax.tree.map(lambda x: x.shape, wanted)
    out = jax.vmap(forward(M).apply, (0, None), axis_name="mp")(shards, X)
    for one in out:  # biases are zero still, so that adding them on each shard does not show
        np.testing.assert_allclose(one, forward(1).apply(whole, X), rtol=1e-5, atol=1e-6)
    assert_same(stack(whole, HAIKU_SPECS, "mp", M), shards)


def test_t11_keys_of_their_own_make_replicated_leaves_differ():
    """And one key for all makes equal shards, which no comparison can tell from right ones."""
    random = {"b_init": hk.initializers.RandomNormal()}
    with pytest.raises(ValueError, match="unstack") as caught:
        unstack(initialised(jax.random.split(jax.random.key(0), M), **random), HAIKU_SPECS, "mp")
    assert str(caught.value) == (
        "unstack: the copies of ['feed_forward/~/linear_1']['b'] differ, but their specs say "
        "replicated. Name the axis in their specs; or make them equal: initialise in full and "
        "`stack`, not by a key for each shard."
    )
    same = jnp.broadcast_to(jax.random.key(0), M)
    whole = unstack(initialised(same, **random), HAIKU_SPECS, "mp")
    columns = np.split(np.asarray(whole["feed_forward/~/linear"]["w"]), M, axis=1)
    assert all(np.array_equal(columns[0], c) for c in columns)


# --- Copies that differ --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "complex64"])
@pytest.mark.parametrize("row", [0, 1])
def test_copies_of_a_replicated_leaf_are_compared(row, dtype):
    copies = jnp.ones((2, 3), dtype)
    assert_same(unstack({"a": copies}, None, "mp"), {"a": copies[0]})
    tree = {"a": copies.at[row, 1].set(2), "b": copies, "c": jnp.asarray(numbers(2, 3), dtype)}
    with pytest.raises(ValueError, match=r"the copies of \['a'\], \['c'\] differ"):
        unstack(tree, None, "mp")


@pytest.mark.parametrize("row", [0, 1])
def test_nan_is_equal_to_nan_alone(row):
    nan = jnp.full((2, 3), jnp.nan)
    assert_same(unstack(nan, None, "mp"), nan[0])
    with pytest.raises(ValueError, match="the copies of tree differ"):
        unstack(nan.at[row, 1].set(0.0), None, "mp")


def test_traced_copies_are_not_compared():
    np.testing.assert_array_equal(jit(lambda x: unstack(x, None, "mp"))(numbers(2, 2)), [0, 1])
