"""Gradient accumulation for JAX and optax with exactly one cross-device mean a step.

`accumulate` decorates a loss function: it runs in microbatches and its gradients are averaged
over the devices once. `MultiSteps` does the same where microbatches arrive call by call: it takes
the `Unreduced` gradients of `unreduced_value_and_grad`. `pad_batch` makes a ragged batch fit.

- `gradaccum.hooks`: what takes the mean instead of an all-reduce (bfloat16, int8, PowerSGD).
- `gradaccum.tensor_parallel`: the operators, layers and loss for model axes.
- `gradaccum.audit`: what a compiled program communicates, loops multiplied out.
- `gradaccum.aot`: meshes of TPUs and GPUs that are not here; microbatches that fit their memory.
- `gradaccum.frameworks`: recipes for Haiku, Flax linen, Flax nnx and Equinox.
"""

from gradaccum import audit as audit
from gradaccum import hooks as hooks
from gradaccum import tensor_parallel as tensor_parallel
from gradaccum._accumulate import accumulate as accumulate
from gradaccum._all_reduce_mean import all_reduce_mean as all_reduce_mean
from gradaccum._decorated import Accumulated as Accumulated
from gradaccum._microbatch import pad_batch as pad_batch
from gradaccum._multisteps import MultiSteps as MultiSteps
from gradaccum._state import MultiStepsState as MultiStepsState
from gradaccum._unreduced import Unreduced as Unreduced
from gradaccum._unreduced import add as add
from gradaccum._unreduced import mean as mean
from gradaccum._unreduced_gradients import unreduced_value_and_grad as unreduced_value_and_grad

__all__ = [
    "Accumulated",
    "MultiSteps",
    "MultiStepsState",
    "Unreduced",
    "accumulate",
    "add",
    "all_reduce_mean",
    "audit",
    "hooks",
    "mean",
    "pad_batch",
    "tensor_parallel",
    "unreduced_value_and_grad",
]
__version__ = "0.1.0"
