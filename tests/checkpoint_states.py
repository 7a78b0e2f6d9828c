"""States to save, the meshes that they lie on, and whether two are the same to the last bit."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MESHES = {
    "eight": lambda: helpers.data_mesh(8),
    "four": lambda: helpers.data_mesh(4),
    "one": lambda: helpers.data_mesh(1),
    "reversed": lambda: jax.sharding.Mesh(np.array(jax.devices())[::-1], "dp"),
    "four by two": lambda: jax.make_mesh(
        (4, 2), ("dp", "mp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    ),
}


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def small(mesh, call=0, model=None):
    """Returns a state of arrays split and whole, keys among them."""
    return {
        "w": put(jnp.arange(64.0).reshape(8, 8) + call, mesh, "dp", model),
        "key": put(jax.random.key(call), mesh),
        "n": put(jnp.int32(call), mesh),
    }


def like(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
        state,
    )


def assert_same(got, want):
    """Asserts two trees alike to the last bit, and where they lie."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype == jax.dtypes.float0:
            continue
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
