"""Meshes of GPUs that are not here, on one or several hosts."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
from collections.abc import Mapping

from jax.experimental import topologies
from jax.sharding import Mesh

from gradaccum.aot._gpu_targets import GPUS, target_config
from gradaccum.aot._make_mesh import arrange, check_axes, sizes
from gradaccum.aot._quiet import environment, silent_stderr

API = "aot.gpu_mesh"
# Package of the compiler, and the module that makes it known to JAX.
_PLUGINS = {
    "jax-cuda12-plugin": "jax_plugins.xla_cuda12",
    "jax-cuda13-plugin": "jax_plugins.xla_cuda13",
}
# The plugin looks for NVIDIA's libraries, which compiling does not need, and refuses to load.
_NO_CUDA = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def gpu_mesh(kind: str, axes: Mapping[str, int], *, hosts: int = 1) -> Mesh:
    """Return a mesh of GPUs that need not be here, spread evenly over hosts.

    Programs compile for it (`jax.jit(f).lower(*shapes).compile()`, with the shardings of
    `jax.ShapeDtypeStruct`s on this mesh), `gradaccum.audit` reads them, and they do not run.
    Neither a GPU nor a library of NVIDIA's is needed. Kernels are not autotuned, as on a machine
    with GPUs they would be: collectives and memory are those of the real program, speed is not.

    Args:
      kind: `"A100"` (80 GB), `"H100"`, `"H200"` or `"B200"`, as in servers of eight (SXM).
      axes: sizes by name, major to minor; their product is the number of GPUs.
      hosts: servers, along the first axes: with {"dp": 16} the first 8 GPUs are one of two.

    Returns:
      A mesh whose axes have the type Auto.

    Raises:
      TypeError: axes is no mapping.
      ValueError: the CUDA plugin is missing (extra `aot-gpu`) or of another version than jaxlib;
        the kind is unknown; the axes are not names with sizes of at least 1; or hosts is no int
        that divides the GPUs.

    Cost:
      The plugin is loaded once, in well under a second. No device is queried. During the call an
      environment variable keeps the plugin from looking for NVIDIA's libraries, and what the
      process writes to stderr is discarded: let no other thread write, or start a process, then.

    Example:
      >>> from gradaccum import aot
      >>> mesh = aot.gpu_mesh("H100", {"dp": 16}, hosts=2)
      >>> mesh.devices.flat[8].process_index, mesh.devices.flat[8].device_kind
      (1, 'NVIDIA H100 80GB HBM3')

    References:
      JAX's ahead-of-time compilation, https://docs.jax.dev/en/latest/aot.html.
    """
    check_axes(API, axes)
    if not isinstance(kind, str) or kind not in GPUS:
        raise ValueError(f"{API}: kind is {kind!r}. Required: one of {', '.join(GPUS)}.")
    gpus = math.prod(axes.values())
    if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1 or gpus % hosts:
        raise ValueError(
            f"{API}: axes {sizes(axes)} do not divide evenly over hosts={hosts!r}. Required: an "
            f"int of at least 1 that divides the {gpus} GPUs."
        )
    module = _check_plugin()
    options = {"target_config": target_config(GPUS[kind]), "topology": f"1x{hosts}x{gpus // hosts}"}
    with silent_stderr(), environment(_NO_CUDA):
        try:
            devices = topologies.get_topology_desc("gradaccum", "cuda", **options).devices
        except NotImplementedError:
            # An earlier device query found no NVIDIA library, and left the plugin out.
            importlib.import_module(module).initialize()
            devices = topologies.get_topology_desc("gradaccum", "cuda", **options).devices
    return arrange(API, axes, devices)


def _check_plugin() -> str:
    """Return the plugin's module; raise ValueError unless it is there, at jaxlib's version."""
    jaxlib = importlib.metadata.version("jaxlib")
    for package, module in _PLUGINS.items():
        if not _installed(module):
            continue
        version = importlib.metadata.version(package)
        if version != jaxlib:
            pjrt = package.replace("plugin", "pjrt")
            raise ValueError(
                f"{API}: {package} is {version}, jaxlib is {jaxlib}. Required: the same version. "
                f"Run: pip install {package}=={jaxlib} {pjrt}=={jaxlib}."
            )
        return module
    raise ValueError(
        f"{API}: programs for GPUs are compiled by JAX's CUDA plugin, which is not installed. "
        "Required: the extra aot-gpu. Run: pip install 'gradaccum[aot-gpu]'."
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package of all plugins
        return False
