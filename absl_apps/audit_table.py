"""What absl_apps.audit says of a compiled program, and the table that compares several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from absl_apps import audit_cost
from absl_apps.bench_measure import Row
from gradaccum import audit

NOT_WRITTEN, NO_ROOM, NOT_GIVEN, UNKNOWN = "not written", "does not fit", "not given", "?"

ESTIMATE = "XLA's own estimate of one call, in which the body of every loop counts once"


########################################## One program ###########################################


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the comparison shows of a program; bytes and FLOPs are those of each device.

    Attributes:
      calls: of the program, a step.
      refusal: why it is not one mean; None where it is.
      collectives: of a step, over all axes; None where a trip count is unknown.
      bytes, wire_bytes: of a step, by axis; an operation over two axes counts for both.
      peak_bytes, temp_bytes: of a call.
      flops: of a step, loops multiplied out; None where that is unknown.
      compiler: XLA's own estimate of a call, the body of each loop counted once.
      instructions: of the optimised program.
      compile_seconds: tracing included.
    """

    calls: int
    refusal: str | None
    collectives: int | None
    bytes: dict[str, int | None]
    wire_bytes: dict[str, int | None]
    peak_bytes: int
    temp_bytes: int
    flops: int | None
    compiler: dict[str, float]
    instructions: int
    compile_seconds: float


def costs(row: Row, mesh: jax.sharding.Mesh, checked: list[tuple[str, ...]], branch: bool) -> Costs:
    """Read a compiled program: for `checked` axes together, whether it is one mean."""

    def total(axis: str | None, measure: Any) -> int | None:
        rows = row.report if axis is None else row.report.over(axis)
        if any(each.executions is None for each in rows):
            return None
        return sum(row.executions(each) * measure(each) for each in rows)

    contender = row.contender
    count = audit_cost.flops(contender.jitted.trace(*contender.shapes), mesh.size)
    return Costs(
        calls=contender.calls,
        refusal=_refusal(row, mesh, checked, branch),
        collectives=total(None, lambda each: 1),
        bytes={axis: total(axis, lambda each: each.bytes) for axis in mesh.shape},
        wire_bytes={axis: total(axis, lambda each: each.wire_bytes) for axis in mesh.shape},
        peak_bytes=row.peak_bytes,
        temp_bytes=row.temp_bytes,
        flops=None if count is None else count * contender.calls,
        compiler=audit_cost.of_compiler(row.program),
        instructions=audit_cost.instructions(row.program),
        compile_seconds=row.compile_seconds,
    )


def _refusal(
    row: Row, mesh: jax.sharding.Mesh, checked: list[tuple[str, ...]], branch: bool
) -> str | None:
    for axes in checked:
        try:
            audit.assert_one_reduction(row.program, axis_name=axes, mesh=mesh, conditional=branch)
        except AssertionError as error:
            return str(error).splitlines()[0].removeprefix("audit.assert_one_reduction: ")
    calls = row.contender.calls
    return f"{calls:,} means a step: one in each call of a microbatch" if calls > 1 else None


########################################### The table ############################################


def markdown(
    found: Mapping[str, Costs | str], mesh: jax.sharding.Mesh, memory_limit: int | None
) -> str:
    """Return the comparison: a line a measure, a column a program, or why there is none.

    Args:
      found: what the programs cost, by name.
      mesh: its axes have lines of their own.
      memory_limit: bytes that a device has for programs, if that is known.
    """

    def line(title: str, cell: Any) -> list[str]:
        return [title, *(x if isinstance(x, str) else cell(x) for x in found.values())]

    def whole(value: int | None) -> str:
        return UNKNOWN if value is None else f"{value:,}"

    lines = [["a step", *found]]
    lines += [line("one cross-device mean", lambda x: "no" if x.refusal else "yes")]
    lines += [line("collectives", lambda x: whole(x.collectives))]
    for axis in mesh.shape:
        lines += [
            line(f"bytes over {axis}", lambda x, axis=axis: whole(x.bytes[axis])),
            line(f"sent by a device over {axis}", lambda x, axis=axis: whole(x.wire_bytes[axis])),
        ]
    of_device = "peak memory, of a device's"
    lines += [
        line("calls of the program", lambda x: whole(x.calls)),
        line("peak memory, bytes", lambda x: whole(x.peak_bytes)),
        *(
            [line(of_device, lambda x: f"{x.peak_bytes / memory_limit:.1%}")]
            if memory_limit
            else []
        ),
        line("temporary memory, bytes", lambda x: whole(x.temp_bytes)),
        line("FLOPs, of matrix products", lambda x: whole(x.flops)),
    ]
    for key, title in audit_cost.COMPILERS.items():
        lines += [line(f"XLA's {title} *", lambda x, key=key: _estimate(x.compiler.get(key)))]
    lines += [
        line("program size, instructions", lambda x: whole(x.instructions)),
        line("compile, s", lambda x: f"{x.compile_seconds:.2f}"),
    ]
    lines.insert(1, ["---", *("---:" for _ in found)])
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(lines[0]))]
    return "\n".join(_aligned(cells, widths) for cells in lines)


def _aligned(cells: list[str], widths: list[int]) -> str:
    first, *others = (
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join([first, *others])} |"


def _estimate(value: float | None) -> str:
    if value is None:
        return NOT_GIVEN
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"
