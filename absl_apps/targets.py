"""The flags that say which devices a program is compiled for: not here, or those that are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import jax
from absl import flags

from absl_apps import meshes
from gradaccum import aot

_TWO_CORES = ("v2", "v3", "tpu7x")  # chips whose cores are devices of their own
FLAGS = ("topology", "gpu", "hosts", "num_slices")


def define(values: flags.FlagValues) -> None:
    """Define the flags on `values`, and the check of their combinations."""
    flags.DEFINE_string(
        "topology",
        None,
        "TPU slice to compile for, as v3:2x2 or v5p:8x8x16; it need not be here. Default: the "
        "devices here.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_slices",
        1,
        "TPU slices, joined by a slower network along the first axis of the mesh.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_string(
        "gpu",
        None,
        "GPU to compile for, of A100, H100, H200, B200; none need be here.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "hosts",
        1,
        "Hosts that the GPUs are spread over, along the first axis of the mesh.",
        lower_bound=1,
        flag_values=values,
    )

    @flags.multi_flags_validator(list(FLAGS), flag_values=values)
    def _one_kind(given: dict[str, object]) -> bool:
        if given["topology"] and given["gpu"]:
            raise flags.ValidationError("--topology is of TPUs, --gpu of GPUs; give one of them.")
        if given["num_slices"] != 1 and not given["topology"]:
            raise flags.ValidationError("--num_slices is of TPUs; it needs --topology.")
        if given["hosts"] != 1 and not given["gpu"]:
            raise flags.ValidationError("--hosts is of GPUs; it needs --gpu.")
        return True

    del _one_kind  # registered


def elsewhere(values: flags.FlagValues) -> bool:
    """Whether the devices are not here: programs compile for them, and do not run."""
    return bool(values.topology or values.gpu)


def make_mesh(values: flags.FlagValues, axes: Mapping[str, int], asked: str) -> jax.sharding.Mesh:
    """Return the mesh of the devices that the flags name.

    Args:
      values: with the flags of `define`, read.
      axes: sizes by name, major to minor.
      asked: the axes in the words of the command line: `"--mesh=dp=8"`.

    Raises:
      ValueError: there are no such devices, or not so many.
    """
    try:
        if values.topology:
            return aot.tpu_mesh(values.topology, axes, num_slices=values.num_slices)
        if values.gpu:
            return aot.gpu_mesh(values.gpu, axes, hosts=values.hosts)
    except ValueError as error:
        kind = f"--topology={values.topology}" if values.topology else f"--gpu={values.gpu}"
        raise ValueError(f"{kind} {asked}: {error}") from None
    return meshes.make(axes, asked, simulate="--cpu_devices")


def default_axes(values: flags.FlagValues) -> dict[str, int]:
    """Return the axes where none are given: dp, over all devices of a slice or server.

    Several slices or hosts are replicas around it. Where the guess is wrong, as of a chip that is
    new, the error of `make_mesh` has the number.
    """
    groups = values.num_slices if values.topology else values.hosts
    axes = {meshes.REPLICA_AXIS: groups} if groups > 1 else {}
    if values.gpu:
        return axes | {meshes.DATA_AXIS: 8}
    if not values.topology:
        return {meshes.DATA_AXIS: jax.device_count()}
    chip, _, shape = values.topology.partition(":")
    chips = math.prod(int(size) for size in re.findall(r"\d+", shape))
    return axes | {meshes.DATA_AXIS: max(1, chips) * (2 if chip in _TWO_CORES else 1)}
