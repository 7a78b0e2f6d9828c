"""Communication hooks, as PyTorch's DistributedDataParallel has them."""

from gradaccum._state import Residual as Residual
from gradaccum.hooks._casts import allreduce as allreduce
from gradaccum.hooks._casts import bf16_compress as bf16_compress
from gradaccum.hooks._casts import fp16_compress as fp16_compress
from gradaccum.hooks._casts import noop as noop
from gradaccum.hooks._int8 import int8_quantize as int8_quantize
from gradaccum.hooks._powersgd import powersgd as powersgd

__all__ = [
    "Residual",
    "allreduce",
    "bf16_compress",
    "fp16_compress",
    "int8_quantize",
    "noop",
    "powersgd",
]
