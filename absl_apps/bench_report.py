"""What absl_apps.bench says of a contender: the numbers of --json, and the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from absl_apps.bench_measure import Row

NOT_MEASURED = "not measured"


def summary(row: Row, ours: Row, gradient_bytes: int, slices: int) -> dict[str, Any]:
    """What --json holds of a contender; times are None where nothing ran."""
    ratios = [a / b for a, b in zip(row.seconds, ours.seconds, strict=True)]
    all_reduces, size = row.reductions()
    return {
        "median_seconds": statistics.median(row.seconds) if row.seconds else None,
        "min_seconds": min(row.seconds, default=None),
        "max_seconds": max(row.seconds, default=None),
        "seconds": row.seconds,
        "ratio": statistics.median(ratios) if ratios else None,
        "all_reduces": all_reduces,
        "all_reduce_bytes": size,
        "other_collective_bytes": row.others(),
        "wire_bytes": row.wire(),
        "calls": row.contender.calls,
        "temp_bytes": row.temp_bytes,
        "temp_gradient_trees": row.temp_bytes / gradient_bytes,
        "peak_bytes": row.peak_bytes,
        "gradient_peak_bytes": row.gradient_peak_bytes,
        "bytes_across_slices": row.across_slices() if slices > 1 else None,
        "state_bytes": row.contender.state_bytes,
        "compile_seconds": row.compile_seconds,
    }


def markdown(
    summaries: Mapping[str, Mapping[str, Any]], gradient_bytes: int, unit: str = "step"
) -> str:
    """Return the table; a gradient tree that is held from call to call is named apart."""
    header = [
        *(unit, "median, s", "min to max, s", "ratio", f"all-reduces a {unit}", f"bytes a {unit}"),
        "sent by each device",
        *("temporary memory, gradient trees", "peak memory, bytes", "of its gradients alone"),
        "compile, s",
    ]
    lines = [f"| {' | '.join(header)} |", "| --- " + "| ---: " * (len(header) - 1) + "|"]
    for name, s in summaries.items():
        timed = s["median_seconds"] is not None
        memory = f"{s['temp_gradient_trees']:.2f}"
        if s["state_bytes"]:
            memory += f" + {s['state_bytes'] / gradient_bytes:.2f} state"
        cells = [
            name,
            f"{s['median_seconds']:.3g}" if timed else NOT_MEASURED,
            f"{s['min_seconds']:.3g} to {s['max_seconds']:.3g}" if timed else NOT_MEASURED,
            f"{s['ratio']:.2f}" if timed else NOT_MEASURED,
            f"{s['all_reduces']:,}",
            f"{s['all_reduce_bytes']:,}",
            f"{s['wire_bytes']:,}",
            memory,
            f"{s['peak_bytes']:,}",
            f"{s['gradient_peak_bytes']:,}" if s["gradient_peak_bytes"] is not None else "-",
            f"{s['compile_seconds']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def lost(name: str, difference: Mapping[str, float], row: Row) -> str:
    """Return a line on a contender whose values are not all of ours."""
    limit = row.contender.tolerance
    allowed = "no mean: not compared" if limit == math.inf else f"at most {limit:g}"
    return f"{name}: update within {difference['update']:.1g} ({allowed})\n"
