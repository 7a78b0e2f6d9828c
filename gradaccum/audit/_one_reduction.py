"""The promise "one cross-device mean", checked on a walked program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from gradaccum.audit._facts import Label, Path
from gradaccum.audit._flow import Flow
from gradaccum.audit._groups import Groups, joined_axes, shared_axes
from gradaccum.audit._parse import Module
from gradaccum.audit._report import Collective, Report, axes_text, site_groups
from gradaccum.audit._sites import Site, exclusive

SCALAR_BYTES = 1024


class Check:
    """The data-axis operations of one program, and what is wrong with them."""

    def __init__(self, module: Module, flow: Flow, report: Report, axes: Sequence[str]):
        self.flow = flow
        self.mesh: Mapping[str, int] = report.mesh
        self.axes = tuple(axis for axis in axes if report.mesh[axis] > 1)
        pairs = zip(flow.sites.values(), report.rows, strict=True)
        data = [(site, row) for site, row in pairs if set(row.axes) & set(self.axes)]
        self.sites: dict[Path, Site] = {site.key: site for site, _ in data}
        self.rows: dict[Path, Collective] = {site.key: row for site, row in data}
        self.groups: dict[Path, Groups] = {
            key: site_groups(site, module, report.mesh) for key, site in self.sites.items()
        }

    def name(self, key: Path) -> str:
        row = self.rows[key]
        shape = row.shapes[0] if len(row.shapes) == 1 else f"{len(row.shapes)} arrays"
        op = f" ({row.op_name})" if row.op_name else ""
        return f"{row.kind} {row.name} of {shape} over {axes_text(row)}{op}"

    def reductions(self) -> list[Label]:
        """Every operand of more than one element that is summed over a data axis."""
        labels = [
            (key, i)
            for key, site in self.sites.items()
            for i in range(len(site.arrays))
            if not site.is_scalar(i) and site.sums(i) and self.rows[key].executions != 0
        ]
        # A hand-made reduce-scatter, as a quantised hook does: exchange, then sum.
        summed = [key for key in self.flow.local_sums if key in self.sites]
        return labels + [(key, 0) for key in summed if self.sites[key].exchanges]

    def shared(self, one: Path, other: Path) -> str:
        """The data axes that both sum over, as text; empty if none."""
        if one not in self.sites or other not in self.sites or exclusive(one, other):
            return ""
        axes = shared_axes(self.groups[one], self.groups[other], self.mesh)
        return ",".join(axis for axis in axes if axis in self.axes)

    def problems(self, *, conditional: bool) -> Iterator[str]:
        """One line for each thing that is wrong, the gravest kind first."""
        yield from self._gathered_and_summed()
        yield from self._missing()
        yield from self._repeated_by_control()
        if not conditional:
            for key, row in self.rows.items():
                if row.conditional:
                    yield (
                        f"{self.name(key)} stands in a branch of a conditional; required: outside "
                        "every branch (or conditional=True, where one mean in a branch is meant)"
                    )
        yield from self._repeated_by_data()
        yield from self._partly()
        yield from self._scalars()

    def _missing(self) -> Iterator[str]:
        labels = self.reductions()
        for axis in self.axes:
            if any(axis in self.rows[key].axes for key, _ in labels):
                continue
            count = sum(axis in row.axes for row in self.rows.values())
            yield (
                f"no gradient is reduced over {axis}={self.mesh[axis]}: of {count} operations over "
                f"it, none sums an array of more than one element (beside "
                f"{self._scalar_bytes(axis):,} bytes of scalars)"
            )

    def _repeated_by_control(self) -> Iterator[str]:
        """Operations in loops, those that move most first."""

        def moved(item: tuple[Path, Collective]) -> float:
            _, row = item
            return math.inf if row.executions is None else row.executions * row.bytes

        for key, row in sorted(self.rows.items(), key=moved, reverse=True):
            loops = "a loop" if len(row.loops) == 1 else f"{len(row.loops)} nested loops"
            if row.executions is None:
                yield (
                    f"{self.name(key)} runs an unknown number of times a call ({row.times}): in "
                    f"{loops}, of which the program does not state every trip count; required: "
                    "once, in no loop"
                )
            elif row.executions > 1:
                yield (
                    f"{self.name(key)} runs {row.times} times a call, in {loops}; required: once, "
                    "in no loop"
                )

    def _repeated_by_data(self) -> Iterator[str]:
        for (one, _), (other, i) in sorted(self.flow.chains):
            if one != other and (axes := self.shared(one, other)):
                yield (
                    f"the same bytes are reduced twice over {axes}: operand {i} of "
                    f"{self.name(other)} carries the result of {self.name(one)}"
                )
        for (one, i), (other, j) in sorted(self.flow.sums):
            if axes := self.shared(one, other):
                yield (
                    f"two reductions over {axes} are added to each other: result {i} of "
                    f"{self.name(one)} and result {j} of {self.name(other)}; required: one "
                    "reduction of the sum"
                )
        same: dict[Hashable, list[Label]] = {}
        for key, i in self.reductions():
            for origin in self.sites[key].operands[i].origin:
                same.setdefault(origin, []).append((key, i))
        pairs = (pair for labels in same.values() for pair in itertools.combinations(labels, 2))
        for (one, i), (other, j) in dict.fromkeys(pairs):
            if axes := self.shared(one, other):
                yield (
                    f"the same bytes are reduced twice over {axes}: operand {i} of "
                    f"{self.name(one)} is operand {j} of {self.name(other)}, up to scaling"
                )
        yield from self._exchanged_too()

    def _exchanged_too(self) -> Iterator[str]:
        """Arrays that are exchanged in a quantised form, and reduced as they are as well."""
        labels = self.reductions()
        for key in dict.fromkeys(key for key, _ in labels if self.sites[key].exchanges):
            todo = [origin for fact in self.sites[key].operands for origin in fact.origin]
            made_of = set(todo)
            while todo:
                new = self.flow.made_of.get(todo.pop(), frozenset()) - made_of
                made_of |= new
                todo += new
            for other, i in labels:
                whole = self.sites[other].operands[i].origin & made_of
                if whole and not self.sites[other].exchanges and (axes := self.shared(key, other)):
                    yield (
                        f"the same bytes are reduced twice over {axes}: {self.name(key)} exchanges "
                        f"what was computed of operand {i} of {self.name(other)}"
                    )

    def _partly(self) -> Iterator[str]:
        """Gradients that some device of a data axis never sees, even along a chain."""
        earlier: dict[Label, set[Label]] = {}
        for one, other in self.flow.chains:
            if one[0] in self.sites and other[0] in self.sites:
                earlier.setdefault(other, set()).add(one)
        followed = set().union(*earlier.values())
        told: set[Path] = set()
        for label in self.reductions():
            key, i = label
            if label in followed or key in told:
                continue
            chain, todo = {label}, [label]
            while todo:
                new = earlier.get(todo.pop(), set()) - chain
                chain |= new
                todo += new
            covered = joined_axes([self.groups[k] for k, _ in sorted(chain)], self.mesh)
            missing = [f"{a}={self.mesh[a]}" for a in self.axes if a not in covered]
            if missing:
                told.add(key)
                yield (
                    f"operand {i} of {self.name(key)} is not reduced over all of "
                    f"{', '.join(missing)}: {len(chain)} reduction(s) of it, the last in groups "
                    f"of {self.rows[key].group_size} devices"
                )

    def _gathered_and_summed(self) -> Iterator[str]:
        for key in sorted(self.flow.local_sums):
            site = self.sites.get(key)
            if site is None or not site.gathers:
                continue
            reduced = {path for fact in site.operands for path, _ in fact.reduced}
            if not any(self.shared(path, key) for path in reduced):
                size = sum(array.bytes for array in site.arrays)
                yield (
                    f"{self.name(key)} gathers {size * site.group_size:,} bytes that every device "
                    f"then sums by itself; required: one reduction (psum, psum_scatter) of "
                    f"{size:,} bytes"
                )

    def _scalar_bytes(self, axis: str) -> int:
        return sum(
            array.bytes // max(array.size, 1)
            for key, site in self.sites.items()
            if site.reduces and axis in self.rows[key].axes
            for i, array in enumerate(site.arrays)
            if site.is_scalar(i)
        )

    def _scalars(self) -> Iterator[str]:
        for axis in self.axes:
            total = self._scalar_bytes(axis)
            if total > SCALAR_BYTES:
                yield (
                    f"{total:,} bytes of scalars are reduced over {axis}; required: at most "
                    f"{SCALAR_BYTES:,}"
                )
