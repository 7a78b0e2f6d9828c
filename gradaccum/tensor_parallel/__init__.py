"""Megatron-style tensor parallelism: what a `jax.shard_map` over a model axis needs.

Initialise parameters in full and place them by their specs (`jax.device_put`, or `out_shardings`
of a jitted init): then they are the same for every number of devices.
"""

from gradaccum.tensor_parallel._cross_entropy import cross_entropy as cross_entropy
from gradaccum.tensor_parallel._layers import column_dense as column_dense
from gradaccum.tensor_parallel._layers import embedding as embedding
from gradaccum.tensor_parallel._layers import row_dense as row_dense
from gradaccum.tensor_parallel._norms import clip_by_global_norm as clip_by_global_norm
from gradaccum.tensor_parallel._norms import global_norm as global_norm
from gradaccum.tensor_parallel._operators import copy_to as copy_to
from gradaccum.tensor_parallel._operators import gather_from as gather_from
from gradaccum.tensor_parallel._operators import reduce_from as reduce_from
from gradaccum.tensor_parallel._operators import scatter_to as scatter_to
from gradaccum.tensor_parallel._sequence import all_gather_to as all_gather_to
from gradaccum.tensor_parallel._sequence import reduce_scatter_from as reduce_scatter_from
from gradaccum.tensor_parallel._stacked import stack as stack
from gradaccum.tensor_parallel._stacked import unstack as unstack

__all__ = [
    "all_gather_to",
    "clip_by_global_norm",
    "column_dense",
    "copy_to",
    "cross_entropy",
    "embedding",
    "gather_from",
    "global_norm",
    "reduce_from",
    "reduce_scatter_from",
    "row_dense",
    "scatter_to",
    "stack",
    "unstack",
]
