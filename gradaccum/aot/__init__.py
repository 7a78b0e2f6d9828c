"""Compile for TPUs and GPUs that are not here, and plan microbatches to fit their memory."""

from gradaccum.aot._gpu import gpu_mesh as gpu_mesh
from gradaccum.aot._make_mesh import make_mesh as make_mesh
from gradaccum.aot._memory import memory_limit as memory_limit
from gradaccum.aot._memory import peak_bytes as peak_bytes
from gradaccum.aot._plan import Plan as Plan
from gradaccum.aot._plan import Trial as Trial
from gradaccum.aot._plan import plan_microbatches as plan_microbatches
from gradaccum.aot._tpu import tpu_mesh as tpu_mesh

__all__ = [
    "Plan",
    "Trial",
    "gpu_mesh",
    "make_mesh",
    "memory_limit",
    "peak_bytes",
    "plan_microbatches",
    "tpu_mesh",
]
