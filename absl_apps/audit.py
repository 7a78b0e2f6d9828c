"""Show what a training step communicates and costs, without running it.

    pip install -e '.[apps,aot-tpu]'
    python -m absl_apps.audit --topology=v3:2x2

The first seed's training step (16 layers of 2048 in a scan, 64 microbatches) is compiled for a
TPU v3-8 that need not be here, in three forms: a loop under jit, optax.MultiSteps, and gradaccum.
Printed are the collectives of each program, and what a step takes of each. Expected, with jax
0.10.2, in 5 s: 1,089 and 1,088 collectives of 17.2 GB in all, in gradaccum's two of 268,435,460
bytes, a gradient tree and the loss; a peak of 1,109, 1,376 and 1,074 MB (--donate: 840, 839, 806).
Other devices, also of several slices or hosts (GPUs: pip install -e '.[apps,aot-gpu]'):

    python -m absl_apps.audit --topology=v5e:2x4
    python -m absl_apps.audit --topology=v5e:4x4 --num_slices=2
    python -m absl_apps.audit --gpu=H100
    python -m absl_apps.audit --gpu=H100 --hosts=128 --mesh=dp=1024

Expected: on v5e:2x4 a peak of 1,075, 1,342 and 1,074 MB. Between two slices a device sends 1,074 MB
a step, and 16,777,728 bytes of gradaccum's. On 8 and on 1,024 H100s a peak of 823, 1,074 and 554
MB, of which 286, 0.1 and 17 are temporary. Where the parameters nearly fill the chip,
--topology=v3:2x2 --d_model=8192 --n_layer=28, two of the programs do not fit and gradaccum's does.

The step of absl_apps.train, with its flags, on the devices here, simulated CPUs where there is
nothing else; the other forms give the compiler the shardings of state and batch, no more:

    python -m absl_apps.audit --program=train
    python -m absl_apps.audit --program=train --topology=v5e:2x4 --zero=3

Expected: 13,652,000, 13,649,936 and 3,412,484 bytes a step; split over the devices 152, 151 and 5.1
MB. A hook (--comm_hook) and --sequence_parallel have no other form: that is 'not written'.

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

import contextlib
import dataclasses
import math
import platform
import sys
from typing import Any

import jax
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import (
    audit_file,
    audit_flags,
    audit_programs,
    audit_table,
    comm_hooks,
    environment,
    flag_parsing,
    meshes,
    microbatch_flags,
    quiet,
    targets,
    train_program,
)
from absl_apps.bench_measure import Row, compile_row
from absl_apps.bench_problem import Contender
from gradaccum import aot

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
    branch = FLAGS.conditional or FLAGS.every_k > 1 or comm_hooks.in_branch(hook)
    programs = _programs(FLAGS, chosen, mesh)
    device = mesh.devices.flat[0]
    limit = aot.memory_limit(device)
    room = f" with {limit:,} bytes for programs" if limit else ""
    print(
        f"{mesh.size:,} devices, {device.device_kind}{room}, {asked}"
        f"{', compiled for only' if targets.elsewhere(FLAGS) else ''}; jax {jax.__version__}, "
        f"Python {platform.python_version()}",
        flush=True,
    )

    rows: dict[str, Row] = {}
    found: dict[str, audit_table.Costs | str] = {}
    # That there is no GPU here is no news where none is needed.
    with quiet.without_remarks() if targets.elsewhere(FLAGS) else contextlib.nullcontext():
        # What only the first compilation costs.
        jax.jit(lambda: 0, out_shardings=NamedSharding(mesh, P())).lower().compile()
        for name, contender in programs.items():
            row = _compile(name, contender, mesh)
            if isinstance(row, str):
                found[name] = row
                continue
            rows[name] = row
            found[name] = audit_table.costs(row, mesh, checked, branch)
            calls = row.contender.calls
            each = f"each of {calls:,} calls a step of " if calls > 1 else ""
            print(f"\n{name}: {each}{row.report}", flush=True)

    print(f"\n{audit_table.markdown(found, mesh, limit)}\n\n* {audit_table.ESTIMATE}")
    devices = math.prod(mesh.shape[axis] for axis in data_axes)
    along = " and ".join(data_axes)
    for name, cost in found.items():
        if isinstance(cost, audit_table.Costs):
            print(f"{name}: {_verdict(cost, along, devices)}")

    results = {
        "flags": chosen,
        **environment.environment(mesh),
        "mesh": dict(mesh.shape),
        "data_axes": data_axes,
        "programs": {
            name: _json_of(rows[name], cost) if name in rows else {"none": cost}
            for name, cost in found.items()
        },
    }
    if FLAGS.json:
        flag_parsing.write_json(FLAGS.json, results)
    last = list(found.values())[-1]  # the user's own, or gradaccum's
    failed = isinstance(last, str) or last.refusal is not None
    return results | {"failed": FLAGS.check and failed}


def _programs(
    FLAGS: flags.FlagValues,  # noqa: N803
    chosen: dict[str, Any],
    mesh: jax.sharding.Mesh,
) -> audit_programs.Programs:
    if FLAGS.program == audit_flags.SEED:
        return audit_programs.seed(chosen, mesh)
    if FLAGS.program == audit_flags.TRAIN:
        microbatch_flags.check(chosen["microbatches"], chosen["hbm_gb"])
        if chosen["microbatches"] == microbatch_flags.AUTO:
            limit = microbatch_flags.memory_limit(chosen["hbm_gb"])
            plan = train_program.plan(chosen, mesh, limit)
            print(f"--microbatches=auto: {plan.microbatches}, of what was compiled:\n{plan}\n")
            chosen = chosen | {"microbatches": plan.microbatches}
        return audit_programs.train(chosen, mesh)
    return {FLAGS.program: audit_file.load(FLAGS.program, mesh)}


def _compile(name: str, contender: Contender | None, mesh: jax.sharding.Mesh) -> Row | str:
    """Return the compiled program, or why there is none."""
    if contender is None:
        return audit_table.NOT_WRITTEN
    try:
        return compile_row(contender, mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"\n{name}: {audit_table.NO_ROOM}: {str(error).splitlines()[0]}", flush=True)
        return audit_table.NO_ROOM


def _verdict(cost: audit_table.Costs, along: str, devices: int) -> str:
    if cost.refusal:
        return f"not one cross-device mean: {cost.refusal}"
    return f"one cross-device mean over {along}" if devices > 1 else f"one device along {along}"


def _json_of(row: Row, cost: audit_table.Costs) -> dict[str, Any]:
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
