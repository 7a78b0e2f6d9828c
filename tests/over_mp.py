"""The Megatron operators over 'mp', and what their tests apply them to."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.tensor_parallel import copy_to, reduce_from

OVER_MP = {"f": lambda x: copy_to(x, "mp"), "g": lambda x: reduce_from(x, "mp")}
Y = helpers.normal(5, 4, 8, 4).astype(np.float32)


def sharded(fun, mesh, in_specs, out_specs, typed, **options):
    options |= {"in_specs": in_specs, "out_specs": out_specs, "check_vma": typed}
    return jax.shard_map(fun, mesh=mesh, **options)


def weigh(y):
    """A replicated loss in which every entry counts differently."""
    return jnp.sum(jnp.sin(y) * jnp.asarray(np.arange(1.0, 1.0 + y.size).reshape(y.shape), y.dtype))
