"""Gradient accumulation for JAX and optax with exactly one cross-device mean per step."""

from gradaccum import audit as audit
from gradaccum._accumulate import Accumulated as Accumulated
from gradaccum._accumulate import accumulate as accumulate
from gradaccum._microbatch import pad_batch as pad_batch

__version__ = "0.1.0"
