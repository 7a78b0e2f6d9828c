"""How much memory a program needs on a device, and how much a device has."""

from __future__ import annotations

from typing import Any

import jax

from gradaccum.aot._gpu_targets import GPUS

# What the compiler takes as available on one device, by its device_kind: GiB that libtpu states
# when a program is too large (a test asks it).
_TPU_GIB = {
    "TPU v2": 7.48,
    "TPU v3": 15.48,
    "TPU v4": 30.75,
    "TPU v5 lite": 15.75,
    "TPU v5": 95.73,
    "TPU v6 lite": 31.24,
    "TPU7x": 94.74,
}
# JAX reserves this part of a GPU when it starts, unless XLA_PYTHON_CLIENT_MEM_FRACTION says other.
_GPU_PART = 0.75


def peak_bytes(program: jax.stages.Compiled) -> int:
    """Return the most memory that a compiled program holds on a device, in bytes.

    By the compiler's own account: arguments, results and temporaries together, a donated argument
    and the result in its place counted once. On TPUs and GPUs it is the compiler's peak, which on
    TPUs counts buffers on the chip (VMEM, some 100 MB at most) too; on CPUs, where that leaves
    temporaries out, arguments + results - donated + temporaries.

    Args:
      program: a compiled program, for devices that are here or not.

    Returns:
      Bytes on each device.

    Raises:
      TypeError: `program` is no compiled program.

    Cost:
      Nothing runs.

    Example:
      >>> import jax
      >>> from gradaccum import aot
      >>> x = jax.ShapeDtypeStruct((1024,), "float32")
      >>> aot.peak_bytes(jax.jit(lambda x: x + 1).lower(x).compile())
      8192
    """
    if not isinstance(program, jax.stages.Compiled):
        raise TypeError(
            f"aot.peak_bytes: got an object of type {type(program).__name__}. Required: a "
            "jax.stages.Compiled. Pass jax.jit(f).lower(*args).compile()."
        )
    memory: Any = program.memory_analysis()
    held: int = memory.argument_size_in_bytes + memory.output_size_in_bytes
    whole: int = held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    peak: int = memory.peak_memory_in_bytes
    # The CPU's peak is below what its arguments, results and temporaries take; others' is theirs.
    return peak if _platform(program) in ("tpu", "gpu") else whole


def memory_limit(device: Any) -> int | None:
    """Return the bytes that programs can use on a device, where that is known.

    For a device that is here, what its allocator may take. For a TPU that is not, what its
    compiler states; for a GPU, three quarters of its memory, which JAX reserves unless
    XLA_PYTHON_CLIENT_MEM_FRACTION, which is not read here, says other.

    Args:
      device: of `jax.devices()` or of a mesh; CPUs have no limit of their own.

    Returns:
      Bytes; None for a CPU, and for a kind that is not known.

    Raises:
      TypeError: `device` is no device.

    Cost:
      Nothing runs.

    Example:
      >>> from gradaccum import aot
      >>> mesh = aot.tpu_mesh("v5e:2x4", {"dp": 8})
      >>> aot.memory_limit(mesh.devices.flat[0]) / 2**30
      15.75
    """
    if not hasattr(device, "device_kind"):
        raise TypeError(
            f"aot.memory_limit: got an object of type {type(device).__name__}. Required: a device. "
            "Pass one of jax.devices(), or mesh.devices.flat[0]."
        )
    try:
        stats = device.memory_stats()
    except Exception:  # a device that is not here has none; which error it raises differs
        stats = None
    if stats and stats.get("bytes_limit"):
        return int(stats["bytes_limit"])
    kind = device.device_kind
    if kind in _TPU_GIB:
        return int(_TPU_GIB[kind] * 2**30)
    memory = {gpu.description: gpu.memory for gpu in GPUS.values()}.get(kind)
    return None if memory is None else int(_GPU_PART * memory)


def _platform(program: jax.stages.Compiled) -> str:
    """The platform that a program was compiled for, from where its arguments and results lie."""
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    # jax 0.10.0 has a value of its own for a sharding that nobody asked for.
    known = [sharding for sharding in shardings if hasattr(sharding, "device_set")]
    devices = [device for sharding in known for device in sharding.device_set]
    return str(devices[0].platform) if devices else jax.default_backend()
