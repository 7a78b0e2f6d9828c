"""How absl_apps.bench measures: compiled programs, then steps in interleaved rounds."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from absl_apps import meshes
from absl_apps.bench_problem import OURS, Contender, Problem
from gradaccum import aot, audit

# Largest relative difference to gradaccum's values. Sums are taken in another order; in bfloat16
# each addition rounds to 8 bits.
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-2}


@dataclasses.dataclass
class Row:
    """What was measured of one contender; bytes are those of each device."""

    contender: Contender
    program: Any  # compiled
    compile_seconds: float  # tracing included
    report: audit.Report
    temp_bytes: int
    peak_bytes: int
    gradient_peak_bytes: int | None  # of the step's gradients alone, a program of their own
    seconds: list[float] = dataclasses.field(default_factory=list)  # one a round

    def reductions(self) -> tuple[int, int]:
        """All-reduces of a step, and their bytes."""
        rows = [row for row in self.report if row.kind == "all-reduce"]
        times = [self.executions(row) for row in rows]
        return sum(times), sum(n * row.bytes for n, row in zip(times, rows, strict=True))

    def others(self) -> dict[str, int]:
        """Bytes a step of every other kind of collective."""
        total: dict[str, int] = {}
        for row in self.report:
            if row.kind != "all-reduce":
                size = self.executions(row) * row.bytes
                total[row.kind] = total.get(row.kind, 0) + size
        return total

    def across_slices(self) -> int:
        """Bytes a step over the replica axis, alone or with another: over DCN between slices."""
        rows = self.report.over(meshes.REPLICA_AXIS)
        return sum(self.executions(row) * row.bytes for row in rows)

    def wire(self) -> int:
        """Bytes that a device sends a step, by all collectives: an all-reduce's almost twice."""
        return sum(self.executions(row) * row.wire_bytes for row in self.report)

    def executions(self, row: audit.Collective) -> int:
        """How often it runs in all calls of a step; what ours has in a branch, in one of them."""
        if row.executions is None:
            raise ValueError(f"the trip count of the loop around {row.name} is unknown.")
        once = self.contender.ours and row.conditional
        return row.executions * (1 if once else self.contender.calls)


def compile_row(contender: Contender, mesh: jax.sharding.Mesh) -> Row:
    started = time.perf_counter()
    program = contender.jitted.lower(*contender.shapes).compile()
    seconds = time.perf_counter() - started
    of_gradients = None
    if contender.gradients is not None:
        of_gradients = aot.peak_bytes(contender.gradients.lower(*contender.shapes).compile())
    return Row(
        contender,
        program,
        seconds,
        audit.collectives(program, mesh=mesh),
        program.memory_analysis().temp_size_in_bytes,
        aot.peak_bytes(program),
        of_gradients,
    )


def run_rounds(
    rows: Mapping[str, Row], problem: Problem, rounds: int
) -> dict[str, dict[str, float]]:
    """Time the contenders in turn, into `rows`; return the differences between their values.

    Raises:
      ArithmeticError: the values of a contender are not gradaccum's. Nothing has been timed.
    """
    params, batch = problem.arrays(seed=0)
    arguments = {name: row.contender.prepare(params, batch) for name, row in rows.items()}

    def step(name: str) -> tuple[Any, float]:
        row = rows[name]
        copies = jax.block_until_ready(jax.tree.map(jnp.copy, arguments[name]))  # to be donated
        started = time.perf_counter()
        values = jax.block_until_ready(row.contender.run(row.program, *copies))
        return values, time.perf_counter() - started

    def first(name: str) -> tuple[Any, Any]:
        (new, loss), _ = step(name)
        return new, rows[name].contender.read_loss(loss)

    # The first steps are not timed; their values are compared.
    lossy = {name: row.contender.tolerance for name, row in rows.items()}
    values = {name: first(name) for name in rows}
    differences = compare(values, params, problem.dtype.name, lossy)
    order = list(rows)
    # disable=None: the bar shows on a terminal only.
    for _ in tqdm.tqdm(range(rounds), unit="round", disable=None):
        for name in order:
            _, seconds = step(name)
            rows[name].seconds.append(seconds)
        order = [*order[1:], order[0]]  # nobody always follows the same neighbour
    return differences


def compare(
    values: Mapping[str, tuple[Any, jax.Array]],
    params: Any,
    dtype: str,
    lossy: Mapping[str, float | None] = MappingProxyType({}),
) -> dict[str, dict[str, float]]:
    """Return each contender's relative differences to gradaccum: of the loss and of the update.

    The update, new - old, is compared in norm; this is stricter than the new parameters. The loss
    is a mean of values of order one and larger, so its scale is at least 1. `lossy` allows larger
    differences of the update to some, by name.
    """

    def flat(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])

    before = flat(params)
    new, our_loss = values[OURS]
    ours, our_loss = flat(new) - before, float(our_loss)
    differences = {}
    for name, (new, loss) in values.items():
        update = flat(new) - before
        differences[name] = {
            "loss": abs(float(loss) - our_loss) / max(1.0, abs(our_loss)),
            "update": float(np.linalg.norm(update - ours) / np.linalg.norm(ours)),
        }
    limit = TOLERANCES[dtype]
    # Not `any(x > limit)`: a NaN must fail too.
    limits = {name: max(limit, lossy.get(name) or 0.0) for name in differences}
    far = {
        name: d
        for name, d in differences.items()
        if not (d["loss"] <= limit and d["update"] <= limits[name])
    }
    if far:
        text = ", ".join(dict.fromkeys(f"{limits[name]:g}" for name in far))
        raise ArithmeticError(
            f"values differ from {OURS}'s by more than {text} ({dtype}): {far}. "
            "No time is worth printing."
        )
    return differences


def program_sizes(
    build: Callable[[Problem], Contender], problem: Problem, microbatches: Sequence[int]
) -> dict[int, int]:
    """Instructions of a contender's optimised program, by number of microbatches of equal rows."""
    rows = problem.batch_size // problem.grad_acc_steps
    sizes = {}
    for k in microbatches:
        resized = dataclasses.replace(problem, grad_acc_steps=k, batch_size=k * rows)
        contender = build(resized)
        text = contender.jitted.lower(*contender.shapes).compile().as_text()
        sizes[k] = len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))
    return sizes
