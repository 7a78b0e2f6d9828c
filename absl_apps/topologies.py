"""Meshes of TPU slices that are not here: programs compile for them, and do not run."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import topologies


def make(
    topology: str, axes: Mapping[str, int], asked: str, num_slices: int = 1
) -> jax.sharding.Mesh:
    """Return a mesh of all devices of one or several TPU slices.

    Args:
      topology: a slice, as `"v5e:2x4"`.
      axes: sizes by name, in order; with several slices the first axis is the one between them.
      asked: the axes in the words of the command line: `"--dp=8"`.
      num_slices: the slices, joined by a slower network.

    Raises:
      ValueError: libtpu is missing or does not know the slice, or the axes do not fill it.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology={topology}: compiling for a TPU needs libtpu, which is not installed; "
            "pip install 'gradaccum[aot-tpu]'."
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU's metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor a TPU to lock others out of
    try:
        with silent_stderr():
            devices = topologies.get_topology_desc(
                platform="tpu", topology_name=topology, num_slices=num_slices
            ).devices
    except Exception as error:  # libtpu's own, of several classes
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--topology={topology}: {reason}; write for example v3:2x2.") from None
    needed = math.prod(axes.values())
    if len(devices) != needed:
        slices = f" in {num_slices} slices" if num_slices > 1 else ""
        raise ValueError(
            f"--topology={topology}: has {len(devices)} devices{slices}, {asked} takes {needed}; "
            "take all of them, or another slice."
        )
    devices = sorted(devices, key=lambda device: getattr(device, "slice_index", 0))
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    shape = tuple(axes.values())
    return jax.sharding.Mesh(np.array(devices).reshape(shape), tuple(axes), axis_types=types)


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Keep native code's lines from stderr: libtpu complains that it is not on a TPU."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
