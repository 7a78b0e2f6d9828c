"""Hooks: what PyTorch's users know, on a decorated loss and in an optimizer.

Gradient hooks are functions, given to `gradaccum.accumulate` or registered on the loss that it
returns: `register_hook` (each microbatch's gradient) and `register_post_accumulate_hook` (a
device's own mean). A *communication hook* replaces the mean over devices:

    comm_hook=gradaccum.hooks.bf16_compress()

`gradaccum.accumulate` takes those without a state; `gradaccum.MultiSteps` and
`gradaccum.all_reduce_mean` all, whose state then is in the optimizer's: saved, restored and donated
with it, and read by `optax.tree.get(opt_state, "noise_scale")`.

| PyTorch | here | what differs |
| --- | --- | --- |
| `Tensor.register_hook` | `register_hook` | sees all gradients of a microbatch, and its `index` |
| `register_post_accumulate_grad_hook` | `register_post_accumulate_hook` | once a call, not after \
every backward pass |
| `DDP.register_comm_hook` | `register_comm_hook`, `comm_hook=` | whole trees, no buckets: XLA \
merges operations itself |
| `DDP.no_sync` | none | microbatches never communicate; what arrives call by call goes to \
`MultiSteps` |
| `allreduce_hook` | `allreduce` | |
| `noop_hook` | `noop` | keeps each device's own part of sharded gradients |
| `bf16_compress_hook` | `bf16_compress` | |
| `fp16_compress_hook` | `fp16_compress` | scaled by the largest entry: nothing overflows |
| `quantization_pertensor_hook`, `quantization_perchannel_hook` | `int8_quantize` | int8 both \
ways, error feedback, stochastic rounding; theirs gathers all rows on every device |
| `powerSGD_hook` | `powersgd` | per layer of a stack; rank 4 from the first step, where theirs \
has rank 1 after 1,000 steps |
| `batched_powerSGD_hook` | none | flattens each bucket into one square matrix: less exact |
| `post_localSGD_hook` | none | averages within a group, and parameters from time to time |
| wrappers `fp16_compress_wrapper`, `bf16_compress_wrapper` | none | the factors are small already |
| none | `gradient_noise_scale(hook)` | up to which size a larger batch pays |

`axis_name=` of a hook names the data axes to compress on: with HSDP the slow one, between slices or
hosts. The others are summed first, in full:

    hook = gradaccum.hooks.powersgd(axis_name="replica")
    gradaccum.MultiSteps(..., axis_name=("replica", "fsdp"), comm_hook=hook)

What is sent, of N float32 gradients, by each device of many (ring): `allreduce` 8 N bytes,
`bf16_compress` and `fp16_compress` 4 N, `int8_quantize` 2 N, `powersgd` 8 r (n + m) for each matrix
of n m, at rank r. `gradaccum.audit` shows it for your own program.

A hook of your own is a frozen dataclass with `init(unreduced) -> state` (which looks at shapes
alone) and `__call__(unreduced, state) -> (mean, state)`. `unreduced` is a tree of
`gradaccum.Unreduced` in the structure of the gradients. Inside a `jax.shard_map` over the data
axes, and in the decorator, each has this device's row `[1, *shape]`; elsewhere all rows
`[n, *shape]`, one a device. What treats rows alike works in both, and `gradaccum.mean` takes the
mean in both. The hook alone divides, by the sum of weights: nothing is divided after it. In a
state, what each device has its own of stands in a `Residual`; all else is the same on all devices.

    >>> import dataclasses, jax, jax.numpy as jnp, gradaccum
    >>> @dataclasses.dataclass(frozen=True)
    ... class Largest:
    ...     '''Sends a row's entries of more than `least` times its largest one.'''
    ...     least: float = 0.5
    ...     def init(self, unreduced):
    ...         return ()
    ...     def __call__(self, unreduced, state):
    ...         def sparse(x):
    ...             size = jnp.abs(x.sum)
    ...             top = size.max(axis=range(1, size.ndim), keepdims=True)
    ...             return dataclasses.replace(x, sum=jnp.where(size > self.least * top, x.sum, 0))
    ...         rows = lambda x: isinstance(x, gradaccum.Unreduced)
    ...         return gradaccum.mean(jax.tree.map(sparse, unreduced, is_leaf=rows)), state
    >>> mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    >>> loss_fn = gradaccum.accumulate(
    ...     lambda w, x: jnp.mean(x @ w), microbatches=1, mesh=mesh, comm_hook=Largest())
    >>> jax.grad(loss_fn)(jnp.zeros(3), jnp.array([[4.0, 1.0, 3.0], [0.0, 2.0, 1.0]])).tolist()
    [2.0, 1.0, 1.5]

References:
  PyTorch's documentation of DDP communication hooks,
  https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
"""

from gradaccum._state import Residual as Residual
from gradaccum.hooks._casts import allreduce as allreduce
from gradaccum.hooks._casts import bf16_compress as bf16_compress
from gradaccum.hooks._casts import fp16_compress as fp16_compress
from gradaccum.hooks._casts import noop as noop
from gradaccum.hooks._int8 import Int8State as Int8State
from gradaccum.hooks._int8 import int8_quantize as int8_quantize
from gradaccum.hooks._noise_scale import NoiseScaleState as NoiseScaleState
from gradaccum.hooks._noise_scale import gradient_noise_scale as gradient_noise_scale
from gradaccum.hooks._powersgd import PowerSGDState as PowerSGDState
from gradaccum.hooks._powersgd import powersgd as powersgd

__all__ = [
    "Int8State",
    "NoiseScaleState",
    "PowerSGDState",
    "Residual",
    "allreduce",
    "bf16_compress",
    "fp16_compress",
    "gradient_noise_scale",
    "int8_quantize",
    "noop",
    "powersgd",
]
