"""What a program communicates: one row a collective, and the table of them."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import overload

from gradaccum.audit._flow import Flow
from gradaccum.audit._groups import Groups, axes_of
from gradaccum.audit._overlap import Schedule
from gradaccum.audit._parse import Module
from gradaccum.audit._sites import Site, is_between_slices

_OP_NAME_WIDTH = 72
# How often a ring of g devices passes on (g - 1) / g of the array; any other kind sends all of it.
_PASSES = {
    "all-reduce": 2,
    "reduce-scatter": 1,
    "all-gather": 1,
    "all-to-all": 1,
    "ragged-all-to-all": 1,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation that moves data between devices, at one place in the program.

    Attributes:
      kind: `all-reduce`, `reduce-scatter`, `all-gather`, `all-to-all`, `ragged-all-to-all`,
        `collective-permute`, `collective-broadcast`, or `send` (whose `recv` is not listed
        again). Asynchronous forms have the same names and are listed once.
      axes: the mesh axes along which it moves data, in mesh order, also where it covers only
        a part of one; `("?",)` where no mesh is known.
      dtype: element type on the wire, as XLA writes it (`f32`); `bf16+f32` if mixed.
      bytes: of one execution, on one device, without padding: the operands' bytes; for an
        all-gather the result's (operand times group size), so that a gradient tree counts
        the same reduced, scattered or gathered.
      executions: times it runs per call of the program: the product of `loops`. None where
        a trip count is unknown.
      conditional: it stands in a branch of a conditional, so it may not run at all.
      op_name: the source operation, from the program's metadata.
      loops: trip counts of the enclosing loops, outermost first; None is unknown.
      shapes: its operands, on one device, as XLA writes them (`f32[16,64]`); arrays that were
        laid end to end into one operand are listed one by one.
      group_size: devices that take part in one group.
      name: its name in the HLO text.
      overlaps: what computes between its start and its done, in the order of the compiled
        schedule: `matmul` (a matrix product or convolution, alone, in a fusion or a library
        call), `fusion` (of anything else), `while`, `conditional`, a custom kernel's name or an
        operation's. What only moves data or computes with scalars is left out, so `()` means
        that nothing hides it. None for an operation that is synchronous, or whose schedule the
        text does not tell.

    Example:
      >>> from gradaccum import audit
      >>> row = audit.Collective(
      ...     kind="all-reduce", axes=("dp",), dtype="f32", bytes=16_384, executions=1_024,
      ...     conditional=False, op_name="", loops=(64, 16), shapes=("f32[64,64]",),
      ...     group_size=8, name="all-reduce-start.1", overlaps=("matmul", "fusion"))
      >>> row.times, row.wire_bytes, row.overlaps
      ('64 x 16 = 1,024', 28672, ('matmul', 'fusion'))
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    executions: int | None
    conditional: bool
    op_name: str
    loops: tuple[int | None, ...]
    shapes: tuple[str, ...]
    group_size: int
    name: str
    overlaps: tuple[str, ...] | None = None

    @property
    def times(self) -> str:
        """The executions with their arithmetic, as in `64 x 16 = 1,024`."""
        total = "?" if self.executions is None else f"{self.executions:,}"
        if len(self.loops) < 2:
            return total
        factors = " x ".join("?" if trips is None else f"{trips:,}" for trips in self.loops)
        return f"{factors} = {total}"

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one execution, by the bandwidth-optimal algorithm.

        With g = `group_size`: 2 (g - 1) / g times `bytes` for an all-reduce, which is a scatter
        and a gather; (g - 1) / g for a reduce-scatter, an all-gather or an all-to-all, as every
        device keeps its own part; all `bytes` for what is sent as it is (a permute, a broadcast,
        a send; the text does not tell how the runtime then reduces between slices). Rounded up
        to whole bytes. Unlike `bytes`, it compares an all-reduce with the exchange and the
        gather of a quantised mean. A ragged all-to-all is taken for an even one, and compilers
        may choose another algorithm: it is what the operation needs, not a measurement.
        """
        passes = _PASSES.get(self.kind)
        if passes is None:
            return self.bytes
        return -(-passes * (self.group_size - 1) * self.bytes // self.group_size)


@dataclasses.dataclass(frozen=True)
class Total:
    """Executions and bytes per call over one axis; None where a trip count is unknown.

    Attributes:
      executions: operations run.
      bytes: the sum of `Collective.bytes` over them.
      wire_bytes: the sum of `Collective.wire_bytes`: what one device sends.
    """

    executions: int | None
    bytes: int | None
    wire_bytes: int | None


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Sequence[Collective]):
    """The collectives of a program, in its order; `str` gives the table.

    Attributes:
      rows: the collectives.
      program: the program's name.
      mesh: axis name -> size, major to minor; empty where no mesh is known.
      num_devices: devices that run the program.

    Example:
      >>> import jax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> from gradaccum import audit
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("dp",))
      >>> rows = jax.ShapeDtypeStruct((16, 4), "float32", sharding=NamedSharding(mesh, P("dp")))
      >>> report = audit.collectives(jax.jit(lambda x: x.sum(0)), rows)
      >>> [row.kind for row in report.over("dp")], report.totals["dp"]
      (['all-reduce'], Total(executions=1, bytes=16, wire_bytes=28))
    """

    rows: tuple[Collective, ...]
    program: str
    mesh: Mapping[str, int]
    num_devices: int

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Collective, ...]: ...
    def __getitem__(self, index: int | slice) -> Collective | tuple[Collective, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def over(self, axis_name: str) -> tuple[Collective, ...]:
        """The collectives over `axis_name`, alone or together with other axes."""
        return tuple(row for row in self.rows if axis_name in row.axes)

    @property
    def totals(self) -> Mapping[str, Total]:
        """Executions and bytes per call, by axis; an operation over two axes counts for both."""
        names = dict.fromkeys([*self.mesh, *(axis for row in self.rows for axis in row.axes)])
        return {name: _total(self.over(name)) for name in names if self.over(name)}

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items()) or "unknown"
        count = f"{len(self)} collective{'' if len(self) == 1 else 's'}"
        title = f"{self.program}: {count} on {self.num_devices:,} devices, mesh {axes}"
        if not self.rows:
            return title
        return "\n".join([title, *_table(self.rows), *_footer(self.totals)])

    __repr__ = __str__


def _total(rows: Iterable[Collective]) -> Total:
    counted = [(row, row.executions) for row in rows]
    known = [(row, times) for row, times in counted if times is not None]
    if len(known) < len(counted):
        return Total(None, None, None)
    return Total(
        executions=sum(times for _, times in known),
        bytes=sum(times * row.bytes for row, times in known),
        wire_bytes=sum(times * row.wire_bytes for row, times in known),
    )


def axes_text(row: Collective) -> str:
    """The axes as a reader names them; without a mesh, the size of the groups."""
    return f"? (groups of {row.group_size})" if row.axes == ("?",) else ",".join(row.axes)


def overlaps_text(row: Collective) -> str:
    """What hides an asynchronous operation, counted: `2 matmul, 1 fusion`."""
    if row.overlaps is None:
        return ""
    counts = collections.Counter(row.overlaps).items()
    return ", ".join(f"{count} {label}" for label, count in counts) or "nothing"


def _table(rows: Sequence[Collective]) -> list[str]:
    shown = any(row.overlaps is not None for row in rows)
    extra = ("overlaps",) if shown else ()
    header = ("kind", "axes", "dtype", "arrays", "bytes", "executions", "branch", *extra, "op")
    cells: list[tuple[str, ...]] = [header]
    for row in rows:
        op = row.op_name or row.name
        short = op if len(op) <= _OP_NAME_WIDTH else "..." + op[3 - _OP_NAME_WIDTH :]
        cells.append(
            (
                row.kind,
                axes_text(row),
                row.dtype,
                f"{len(row.shapes):,}",
                f"{row.bytes:,}",
                row.times,
                "yes" if row.conditional else "",
                *((overlaps_text(row),) if shown else ()),
                short,
            )
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    numeric = {3, 4, 5}
    return [
        "  ".join(
            cell.rjust(width) if i in numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _footer(totals: Mapping[str, Total]) -> list[str]:
    def number(value: int | None) -> str:
        return "?" if value is None else f"{value:,}"

    return [
        f"total over {name}: executions {number(total.executions)}, bytes {number(total.bytes)}, "
        f"sent by each device {number(total.wire_bytes)}"
        for name, total in totals.items()
    ]


def device_count(module: Module, mesh: Mapping[str, int]) -> int:
    """Devices of the whole program: of the mesh, where several TPU slices run one text each."""
    return math.prod(mesh.values()) if mesh else module.num_devices


def site_groups(site: Site, module: Module, mesh: Mapping[str, int]) -> Groups:
    """A site's groups as positions in the mesh.

    A program for several TPU slices has the text of one slice; the mesh is taken to be
    slice-major, so that slice s holds the positions from s * devices per slice on.
    """
    if is_between_slices(site.instruction):
        return site.groups
    local = module.num_devices
    return tuple(
        tuple(first + i for i in group)
        for first in range(0, device_count(module, mesh), local)
        for group in site.groups
    )


def _row(site: Site, schedule: Schedule, mesh: Mapping[str, int]) -> Collective:
    groups = site_groups(site, schedule.module, mesh)
    group_size = max((len(set(group)) for group in groups), default=1)
    known = None not in site.loops
    size = sum(array.bytes for array in site.arrays)
    return Collective(
        kind=site.kind,
        axes=axes_of(groups, mesh) if mesh else ("?",),
        dtype="+".join(sorted({array.dtype for array in site.arrays})),
        bytes=size * group_size if site.kind == "all-gather" else size,
        executions=math.prod(trips or 0 for trips in site.loops) if known else None,
        conditional=site.conditional,
        op_name=site.instruction.op_name,
        loops=site.loops,
        shapes=tuple(map(str, site.arrays)),
        group_size=group_size,
        name=site.instruction.name,
        overlaps=schedule.overlaps(site.key),
    )


def report(module: Module, flow: Flow, mesh: Mapping[str, int]) -> Report:
    """Make the report of a program that has been walked."""
    schedule = Schedule(module)
    return Report(
        rows=tuple(_row(site, schedule, mesh) for site in flow.sites.values()),
        program=module.name,
        mesh=mesh,
        num_devices=device_count(module, mesh),
    )
