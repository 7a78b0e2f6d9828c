"""What absl_apps.tensor_parallel measures and prints: differences by leaf, collectives by axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from gradaccum import audit

LOSS = "loss"  # the first of the leaves

Leaves = Sequence[Mapping[str, Any]]


def compare(got: Any, want: Any, specs: Any) -> list[dict[str, Any]]:
    """Return what is to be said of the loss and of each gradient, in order.

    Args:
      got, want: (loss, grads); `got` of arrays on the mesh, `want` of NumPy arrays.
      specs: how the gradients lie.

    Returns:
      path; shape, of the whole array; spec; difference, the largest on any device, relative to the
      largest entry of `want`; factor, the ratio of norms; copies_differ, whether devices that
      should hold the same do not (then the factor is that of the first one's).
    """
    keyed, tree = jax.tree_util.tree_flatten_with_path(got)
    flat_specs = jax.tree.leaves((PartitionSpec(), specs))
    rows = zip(keyed, tree.flatten_up_to(want), flat_specs, strict=True)
    return [
        {
            "path": jax.tree_util.keystr(path[1:], simple=True, separator="/") or LOSS,
            "shape": list(x.shape),
            "spec": f"P({', '.join(map(repr, spec))})",
            **_differences(x, np.asarray(reference, np.float64)),
        }
        for (path, x), reference, spec in rows
    ]


def _differences(got: jax.Array, want: np.ndarray) -> dict[str, Any]:
    # Of every device: np.asarray(got) has one copy only of what several hold.
    first: dict[str, np.ndarray] = {}
    error, copies_differ = 0.0, False
    for shard in got.addressable_shards:
        data = np.asarray(shard.data, np.float64)
        error = np.maximum(error, np.max(np.abs(data - want[shard.index])))  # keeps a NaN
        copy = first.setdefault(str(shard.index), data)
        copies_differ |= not np.array_equal(copy, data, equal_nan=True)
    largest = np.max(np.abs(want))
    norms = [np.linalg.norm(np.ravel(np.asarray(x, np.float64))) for x in (got, want)]
    return {
        "difference": float(error / largest),
        "factor": float(norms[0] / norms[1]),
        "copies_differ": copies_differ,
    }


def too_large(leaves: Leaves, tolerance: float) -> list[str]:
    """Return the leaves, the loss among them, that differ by more than the tolerance."""
    # Not `difference > tolerance`: a NaN must fail too.
    return [leaf["path"] for leaf in leaves if not leaf["difference"] <= tolerance]


def summary(models: Mapping[str, Leaves], tolerance: float) -> str:
    """Return how many leaves of some models differ by too much, and which differs most."""
    pairs = [(name, leaf) for name, leaves in models.items() for leaf in leaves]
    far = sum(len(too_large(leaves, tolerance)) for leaves in models.values())

    def size(pair: tuple[str, Mapping[str, Any]]) -> float:
        difference = pair[1]["difference"]
        return math.inf if math.isnan(difference) else difference  # more than any number

    name, leaf = max(pairs, key=size)
    return (
        f"of {len(pairs)} losses and gradients {far or 'none'} differ by more than {tolerance:g}; "
        f"the largest difference is {leaf['difference']:.2g}, {name} {leaf['path']}"
    )


def traffic(report: audit.Report) -> list[dict[str, Any]]:
    """Return executions and bytes a call by axis and kind; None where a trip count is unknown.

    Operations outside every loop are kept apart from those in the loop over microbatches.
    """
    groups: dict[tuple[str, str, bool], list[audit.Collective]] = {}
    for row in report:
        groups.setdefault((",".join(row.axes), row.kind, bool(row.loops)), []).append(row)
    return [
        {
            "axes": axes,
            "kind": kind,
            "in_loop": in_loop,
            "executions": _sum(row.executions for row in rows),
            "bytes": _sum(
                None if row.executions is None else row.executions * row.bytes for row in rows
            ),
        }
        for (axes, kind, in_loop), rows in sorted(groups.items())
    ]


def _sum(numbers: Any) -> int | None:
    numbers = list(numbers)
    return None if None in numbers else sum(numbers)


def leaves_table(leaves: Leaves, factors: bool) -> str:
    """Return the differences as aligned text; with factors, what a broken rule did."""
    header = ["leaf", "shape", "spec", "difference"] + ["factor"] * factors
    lines = [
        [
            leaf["path"],
            "x".join(map(str, leaf["shape"])),
            leaf["spec"],
            f"{leaf['difference']:.1e}",
            *([f"{leaf['factor']:.3f}" + ", copies differ" * leaf["copies_differ"]] * factors),
        ]
        for leaf in leaves
    ]
    return _aligned([header, *lines], left=3)


def collectives_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return executions and bytes a call, by axis, kind and place, and in all by axis."""

    def number(value: int | None) -> str:
        return "?" if value is None else f"{value:,}"

    header = ["axis", "collective", "in a loop", "executions", "bytes"]
    lines = [
        [
            row["axes"],
            row["kind"],
            "yes" if row["in_loop"] else "no",
            *(number(row[name]) for name in ("executions", "bytes")),
        ]
        for row in rows
    ]
    for axes in dict.fromkeys(row["axes"] for row in rows):
        mine = [row for row in rows if row["axes"] == axes]
        totals = [number(_sum(row[name] for row in mine)) for name in ("executions", "bytes")]
        lines.append([axes, "total", "", *totals])
    return _aligned([header, *lines], left=3)


def _aligned(cells: Sequence[Sequence[str]], left: int) -> str:
    """Return lines whose first columns are flush left, the others flush right."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
