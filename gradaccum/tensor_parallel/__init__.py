"""Megatron-style tensor parallelism: what a `jax.shard_map` over a model axis needs."""

from gradaccum.tensor_parallel._operators import copy_to as copy_to
from gradaccum.tensor_parallel._operators import gather_from as gather_from
from gradaccum.tensor_parallel._operators import reduce_from as reduce_from
from gradaccum.tensor_parallel._operators import scatter_to as scatter_to

__all__ = ["copy_to", "gather_from", "reduce_from", "scatter_to"]
