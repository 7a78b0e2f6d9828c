"""Show what a training step communicates and costs, without running it.

    pip install -e '.[apps,aot-tpu]'
    python -m absl_apps.audit --topology=v3:2x2

Compiled is the first seed's training step (16 layers of 2048 in a scan, 64 microbatches), for a
TPU v3-8 that need not be here, in three forms: a loop under jit, optax.MultiSteps, and gradaccum.
Printed are the collectives of each and a comparison of bytes by mesh axis, memory, FLOPs and
compile time.

A step of your own is a function in a file. It is called with the mesh, and returns the step,
jitted or not, and its arguments in a tuple, as shapes with shardings on this mesh. As step.py:

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P

    def describe(mesh):
        def loss_fn(params, batch):
            return jnp.mean((batch @ params) ** 2)

        @jax.jit
        def step(params, batch):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            return params - 0.1 * grads, loss

        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp"))
        params = jax.ShapeDtypeStruct((256, 256), "float32", sharding=whole)
        batch = jax.ShapeDtypeStruct((64, 256), "float32", sharding=split)
        return step, (params, batch)

With --check the exit code is 1 where it is not one cross-device mean:

    python -m absl_apps.audit --topology=v5e:2x4 --program=step.py:describe --check
"""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Mapping
from typing import Any

import jax
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import (
    audit_cost,
    audit_file,
    audit_flags,
    audit_programs,
    comm_hooks,
    meshes,
    run_files,
    targets,
)
from absl_apps.bench_measure import Row, compile_row
from absl_apps.bench_problem import OURS
from gradaccum import audit

NOT_WRITTEN, NOT_GIVEN, UNKNOWN = "not written", "not given", "?"


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


def markdown(found: Mapping[str, Costs | None], mesh: jax.sharding.Mesh) -> str:
    """Return the comparison: a line a measure, a column a program."""

    def line(title: str, cell: Any) -> list[str]:
        return [title, *(NOT_WRITTEN if x is None else cell(x) for x in found.values())]

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
    lines += [
        line("calls of the program", lambda x: whole(x.calls)),
        line("peak memory, bytes", lambda x: whole(x.peak_bytes)),
        line("temporary memory, bytes", lambda x: whole(x.temp_bytes)),
        line("FLOPs of a device", lambda x: whole(x.flops)),
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


########################################### The program ##########################################


def run(FLAGS: flags.FlagValues) -> dict[str, Any]:  # noqa: N803
    """Run the whole program; return what --json holds, with `failed` for --check."""
    chosen = audit_flags.chosen(FLAGS)
    axes = meshes.parse(FLAGS.mesh) if FLAGS.mesh else targets.default_axes(FLAGS)
    asked = f"--mesh={','.join(f'{axis}={size}' for axis, size in axes.items())}"
    mesh = targets.make_mesh(FLAGS, axes, asked)
    data_axes = _data_axes(FLAGS.axis_name, mesh)
    hook = comm_hooks.parse(FLAGS.comm_hook) if FLAGS.comm_hook else None
    checked = comm_hooks.audited_axes(hook, data_axes)
    programs: audit_programs.Programs
    if FLAGS.program == audit_flags.SEED:
        programs = audit_programs.seed(chosen, mesh)
    elif FLAGS.program == audit_flags.TRAIN:
        programs = audit_programs.train(chosen, mesh)
    else:
        programs = {FLAGS.program: audit_file.load(FLAGS.program, mesh)}
    kind = mesh.devices.flat[0].device_kind
    print(
        f"{mesh.size:,} devices, {kind}, {asked}"
        f"{', compiled for only' if targets.elsewhere(FLAGS) else ''}; jax {jax.__version__}, "
        f"Python {platform.python_version()}",
        flush=True,
    )
    # What only the first compilation costs.
    whole = NamedSharding(mesh, P())
    jax.jit(lambda: 0, out_shardings=whole).lower().compile()

    rows, found = {}, {}
    for name, contender in programs.items():
        if contender is None:
            found[name] = None
            continue
        row = rows[name] = compile_row(contender, mesh)
        found[name] = costs(row, mesh, checked, comm_hooks.in_branch(hook))
        each = f"each of {contender.calls:,} calls a step of " if contender.calls > 1 else ""
        print(f"\n{name}: {each}{row.report}", flush=True)

    print(f"\n{markdown(found, mesh)}\n")
    print("* by the compiler's own account, of one call, with the body of every loop counted once")
    along = " and ".join(data_axes)
    for name, cost in found.items():
        if cost is not None:
            said = f"not one cross-device mean: {cost.refusal}" if cost.refusal else "one mean"
            print(f"{name}: {said}{'' if cost.refusal else f' over {along}: checked'}")

    results = {
        "flags": chosen,
        **run_files.environment(mesh),
        "mesh": dict(mesh.shape),
        "data_axes": data_axes,
        "programs": {
            name: None if cost is None else _json_of(rows[name], cost)
            for name, cost in found.items()
        },
    }
    if FLAGS.json:
        with open(FLAGS.json, "w") as stream:
            json.dump(results, stream, indent=1)
            stream.write("\n")
    checks = found.get(OURS) or found.get(FLAGS.program)
    return results | {"failed": bool(FLAGS.check and checks.refusal)}


def _json_of(row: Row, cost: Costs) -> dict[str, Any]:
    totals = {axis: dataclasses.asdict(total) for axis, total in row.report.totals.items()}
    return {
        **dataclasses.asdict(cost),
        "totals_of_a_call": totals,
        "collectives_of_a_call": [dataclasses.asdict(each) for each in row.report],
    }


def _data_axes(named: list[str] | None, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    axes = tuple(named) if named else meshes.data_axes(mesh)
    unknown = [axis for axis in axes if axis not in mesh.shape]
    if unknown or not axes:
        raise ValueError(
            f"--axis_name: the mesh has axes {', '.join(mesh.shape)}, and of these "
            f"{f'not {unknown[0]}' if unknown else 'no data axis'}; name the data axes."
        )
    return axes


def main(argv: list[str]) -> int:
    del argv  # audit_flags.parse has refused all but flags
    meshes.prepare_platform(flags.FLAGS.cpu_devices)
    meshes.first_query()
    try:
        return int(run(flags.FLAGS)["failed"])
    except (ValueError, OSError) as error:
        sys.exit(f"audit: {error}")


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: audit_flags.parse(argv, flags.FLAGS, __doc__ or ""))
