"""Gradient accumulation for JAX and optax with exactly one cross-device mean a step.

`accumulate` decorates a loss function: it runs in microbatches and its gradients are averaged
over the devices once. `pad_batch` makes a ragged batch fit. `gradaccum.audit` shows what a
compiled program communicates. `gradaccum.tensor_parallel` has the operators for model axes.
"""

from gradaccum import audit as audit
from gradaccum import tensor_parallel as tensor_parallel
from gradaccum._accumulate import accumulate as accumulate
from gradaccum._decorated import Accumulated as Accumulated
from gradaccum._microbatch import pad_batch as pad_batch

__all__ = ["Accumulated", "accumulate", "audit", "pad_batch", "tensor_parallel"]
__version__ = "0.1.0"
