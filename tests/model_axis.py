"""What tests of tensor_parallel share: meshes with a model axis, and functions of its shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

modes = pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])
sizes = pytest.mark.parametrize("m", [1, 2, 4])


def mesh_of(*sizes, names=("mp",)):
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def sharded(fun, in_specs, out_specs, m=2, typed=False, **options):
    options |= {"in_specs": in_specs, "out_specs": out_specs, "check_vma": typed}
    return jax.shard_map(fun, mesh=mesh_of(m) if isinstance(m, int) else m, **options)


def cast(tree, dtype):
    return jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(dtype)), tree)
