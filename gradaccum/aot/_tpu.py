"""Meshes of TPU slices that are not here."""

from __future__ import annotations

import glob
import importlib.util
import math
import re
from collections.abc import Mapping

from jax.experimental import topologies
from jax.sharding import Mesh

from gradaccum.aot._make_mesh import arrange, check_axes, sizes
from gradaccum.aot._quiet import environment, silent_stderr

API = "aot.tpu_mesh"
# Chips by the name that libtpu takes, each with a slice of it for the list of known ones.
_KINDS = {
    "v2": "2x2",
    "v3": "2x2",
    "v4": "2x2x1",
    "v5e": "2x4",
    "v5p": "2x2x1",
    "v6e": "2x4",
    "tpu7x": "2x2x1",
}
# On v4 JAX runs the two cores of a chip as one device; libtpu's default for a topology is two.
_CONFIGS = {"v4": "megacore"}
# libtpu looks for a TPU's metadata server, and locks TPUs to one process; neither is here.
_NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_TPU_NODES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def tpu_mesh(topology: str, axes: Mapping[str, int], *, num_slices: int = 1) -> Mesh:
    """Return a mesh of all devices of one or several TPU slices that need not be here.

    Programs compile for it (`jax.jit(f).lower(*shapes).compile()`, with the shardings of
    `jax.ShapeDtypeStruct`s on this mesh), `gradaccum.audit` reads them, and they do not run.
    Devices lie in the mesh as `aot.make_mesh` lays those that are here.

    Args:
      topology: chip and shape of one slice, in chips, as libtpu writes them: `"v3:2x2"`,
        `"v5e:2x4"`, `"v5p:8x8x16"`. A v2, v3 or tpu7x chip is two devices, any other one.
      axes: sizes by name, major to minor; together all devices of all slices.
      num_slices: equal slices, joined by a slower network (DCN) along the first axis.

    Returns:
      A mesh whose axes have the type Auto.

    Raises:
      TypeError: axes is no mapping.
      ValueError: libtpu is missing (extra `aot-tpu`) or does not know the slice, with the chips
        that it knows; num_slices is no int of at least 1; the axes are not names with sizes of at
        least 1, do not take all devices, or not with the slices along the first of them.

    Cost:
      libtpu is loaded once, about half a second; 1,024 chips take two more. No device is queried,
      and the process's own platform is left as it is. During the call what the process writes to
      stderr is discarded and, where there is no TPU, two environment variables tell libtpu so:
      let no other thread write, or start a process, meanwhile.

    Example:
      >>> from gradaccum import aot
      >>> mesh = aot.tpu_mesh("v3:2x2", {"dp": 8})
      >>> mesh.devices.flat[0].device_kind, dict(mesh.shape)
      ('TPU v3', {'dp': 8})

    References:
      JAX's ahead-of-time compilation, https://docs.jax.dev/en/latest/aot.html.
    """
    check_axes(API, axes)
    if isinstance(num_slices, bool) or not isinstance(num_slices, int) or num_slices < 1:
        raise ValueError(f"{API}: num_slices is {num_slices!r}. Required: an int of at least 1.")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"{API}: topology {topology!r} is compiled by libtpu, which is not installed. "
            "Required: the extra aot-tpu. Run: pip install 'gradaccum[aot-tpu]'."
        )
    try:
        # libtpu divides by the sizes without a look, and takes no name for one of its own.
        if not re.fullmatch(r"[^:=]+[:=][1-9]\d*(x[1-9]\d*)*(_\w+)?", str(topology)):
            raise ValueError("not written CHIP:SIZExSIZE, of sizes of at least 1")
        devices = _devices(topology, num_slices)
    except Exception as error:  # libtpu's own, of several classes
        reason = str(error).strip().splitlines()[0]
        known = [f"{kind}:{shape}" for kind, shape in _KINDS.items() if _known(kind, shape)]
        raise ValueError(
            f"{API}: topology {topology!r} is not known to the installed libtpu ({reason}). "
            f"Required: a chip and the shape of a slice, of chips {', '.join(known)}."
        ) from None
    needed = math.prod(axes.values())
    if len(devices) != needed:
        of = f"{num_slices} slices of {topology}" if num_slices > 1 else topology
        raise ValueError(
            f"{API}: {of} has {len(devices)} devices, axes {sizes(axes)} take {needed}. Required: "
            "all of them. Change the sizes, or take another slice."
        )
    return arrange(API, axes, devices)


def _devices(topology: str, num_slices: int) -> list[object]:
    here = any(glob.glob(pattern) for pattern in _TPU_NODES)
    config = _CONFIGS.get(topology.partition(":")[0])
    options: dict[str, object] = {"chip_config_name": config} if config else {}
    if num_slices > 1:
        options["num_slices"] = num_slices
    with silent_stderr(), environment({} if here else _NO_TPU):
        return list(
            topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
        )


def _known(kind: str, shape: str) -> bool:
    try:
        return bool(_devices(f"{kind}:{shape}", 1))
    except Exception:  # as above
        return False
