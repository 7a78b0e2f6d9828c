"""Which devices a program runs on, `--mesh=dp=8` read into a mesh, and how arrays lie on it.

`prepare_platform` must run before the first device query, because JAX settles its platform and
its number of CPU devices at that query; `make` is the first to ask.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import math
import os
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from absl_apps import quiet
from gradaccum import aot

DATA_AXIS = "dp"
FSDP_AXIS = "fsdp"  # a data axis that the state is split over
REPLICA_AXIS = "replica"  # outside it, where there are two: slices, or copies of a sharded state
MODEL_AXIS = "mp"  # inside both: neighbours, as they communicate in every layer

# Smaller arrays stay whole: a collective of their own costs more than their memory.
_SMALLEST_SPLIT = 1024  # elements

# What the kernel shows of the accelerators that JAX itself looks for.
_ACCELERATOR_NODES = (
    "/dev/accel*",  # TPU v2 to v4
    "/dev/vfio/[0-9]*",  # TPU v5 and later
    "/dev/nvidia[0-9]*",
    "/dev/nvidiactl",  # NVIDIA in containers
    "/dev/dxg",  # GPUs under WSL 2
    "/dev/kfd",  # AMD
)
_GOOGLE_PCI_VENDOR = "0x1ae0"
_GOOGLE_PCI_NETWORK_CARD = "0x0042"  # on every Google Cloud machine, TPU or not


def prepare_platform(cpu_devices: int) -> None:
    """Ask for `cpu_devices` simulated devices should JAX run on the CPU; query no device.

    What the environment or the caller has already chosen is kept: JAX_PLATFORMS,
    JAX_NUM_CPU_DEVICES and XLA_FLAGS=--xla_force_host_platform_device_count.

    Args:
      cpu_devices: the number of simulated CPU devices, of each process where there are several.
        Accelerators, where there are any, are used as they are.
    """
    if jax.config.jax_platforms is None and not _accelerator_possible():
        # With libtpu installed for ahead-of-time compilation but no TPU in the machine, JAX falls
        # back to the CPU too, but only after libtpu has written several errors to stderr.
        jax.config.update("jax_platforms", "cpu")
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices < 0 and not forced:
        jax.config.update("jax_num_cpu_devices", cpu_devices)


def first_query() -> None:
    """Let JAX look for devices; on the CPU, without a CUDA plugin's remark that there is no GPU."""
    # Where there are accelerators, what they say is heard at once: finding them may take long.
    on_cpu = jax.config.jax_platforms == "cpu"
    with quiet.without_remarks() if on_cpu else contextlib.nullcontext():
        jax.devices()


def parse(text: str) -> dict[str, int]:
    """Return the axes of `"dp=8"` or `"replica=2,dp=2,mp=2"`, in order.

    Raises:
      ValueError: unless the text is a list of distinct `name=size`, each size at least 1.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([A-Za-z_]\w*)=(\d+)", part.strip())
        if match is None or int(match[2]) < 1 or match[1] in axes:
            raise ValueError(
                f"{part!r} is not a new axis name=size with size >= 1; "
                "write for example --mesh=dp=8."
            )
        axes[match[1]] = int(match[2])
    return axes


def make(axes: Mapping[str, int], asked: str, simulate: str | None = None) -> jax.sharding.Mesh:
    """Return a mesh of the first devices, as many as the axes need; slices along the first axis.

    Args:
      axes: sizes by name, in order.
      asked: what the user asked for, in the words of the command line: `"--mesh=dp=8"`.
      simulate: the flag, if there is one, that sets the number of simulated devices.

    Raises:
      ValueError: if there are fewer devices than that, a process would have none of them, or they
        are of several slices, and the first axis does not divide between these.
    """
    devices, needed = jax.devices(), math.prod(axes.values())
    if needed > len(devices):
        platform = devices[0].platform
        more = simulate and platform == "cpu"
        remedy = f"{simulate}={needed} simulates more" if more else f"use {len(devices)} or fewer"
        product = " * ".join(map(str, axes.values()))
        raise ValueError(
            f"{asked}: needs {product + ' = ' if len(axes) > 1 else ''}{needed} devices, "
            f"found {len(devices)} ({platform}); {remedy}."
        )
    idle = {device.process_index for device in devices[needed:]}
    idle -= {device.process_index for device in devices[:needed]}
    if idle:
        raise ValueError(
            f"{asked}: takes {needed} of {len(devices)} devices, and none of process {min(idle)}; "
            f"take all {len(devices)}, or start fewer processes."
        )
    # Auto axes: the step is written for the whole batch, and the compiler places the rest.
    return aot.make_mesh(axes, devices[:needed])


def local_rows(sharding: jax.sharding.Sharding, batch: int) -> np.ndarray:
    """Return which rows of a batch the devices of this process hold, in order, each once.

    That is for the sharding to say: a process need not hold rows that adjoin, and processes that
    share a model axis hold the same ones.
    """
    held = sharding.addressable_devices_indices_map((batch,)).values()
    return np.unique(np.concatenate([np.arange(batch)[rows] for (rows,) in held]))


def data_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Return the axes that the batch is split over: all but the model axis."""
    return tuple(axis for axis in mesh.axis_names if axis != MODEL_AXIS)


def split_spec(
    shape: Sequence[int], mesh: jax.sharding.Mesh, model: PartitionSpec | None = None
) -> PartitionSpec:
    """Return how a parameter, its gradient and its optimizer state lie when they are split.

    Over the mesh's last data axis (a replica axis outside it holds copies: HSDP), along the first
    dimension whose size divides. Small arrays, and those that do not divide, are replicated. Where
    `model` says how the array lies over the model axis, all this is said of a device's shard; in
    a dimension that both split, the model axis comes first, so that the parts of a shard adjoin.

    Why the first and not, say, the largest: compiled for 8 H100s, the gradient of a float32 stack
    [16, 2048, 2048] peaks at 571 MB split along its first dimension, whose parts are contiguous,
    at 839 MB along either other, where the reduce-scatter takes a transposed copy. CPUs do the
    same. A TPU does not mind (v5e 2x4: 571 MB along any) but for the last dimension in parts of no
    whole 128 lanes: [8, 1024, 3072] over 16 was all-reduced and cut (two v5e 4x4 slices).
    """
    axis = data_axes(mesh)[-1]
    model = PartitionSpec() if model is None else model
    outer = [*model, *[None] * (len(shape) - len(model))]
    shard = [size // mesh.shape.get(name, 1) for size, name in zip(shape, outer, strict=True)]
    fits = [i for i, size in enumerate(shard) if size and size % mesh.shape[axis] == 0]
    if math.prod(shard) < _SMALLEST_SPLIT or not fits:
        return model
    first = fits[0]
    outer[first] = (outer[first], axis) if outer[first] else axis
    return PartitionSpec(*outer[: max(len(model), first + 1)])


def _accelerator_possible() -> bool:
    """Whether any accelerator, or a JAX plugin for one unknown here, is in this machine."""
    if any(glob.glob(pattern) for pattern in _ACCELERATOR_NODES):
        return True
    for vendor in glob.glob("/sys/bus/pci/devices/*/vendor"):
        ids = [_read(vendor), _read(os.path.join(os.path.dirname(vendor), "device"))]
        if ids[0] == _GOOGLE_PCI_VENDOR and ids[1] != _GOOGLE_PCI_NETWORK_CARD:
            return True
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any(not re.match("xla_(cuda|rocm)", plugin.name) for plugin in plugins)


def _read(path: str) -> str:
    try:
        with open(path) as stream:
            return stream.read().strip()
    except OSError:
        return ""
