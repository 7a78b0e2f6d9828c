"""Time one training step written in several ways, side by side, and count what each communicates.

    pip install -e '.[apps]'
    python -m absl_apps.bench

The step is that of eight residual layers of 512 in a scan, batch 512 in 64 microbatches, float32,
data parallel over 8 devices: accelerators where there are any, else simulated on the CPU. In every
round each contender takes one step, in an order that rotates. The time is the median over rounds;
the ratio is the median of each round's own ratio to gradaccum. Loss and new parameters must agree
before any time is printed, or the program exits with an error. Beside the naive step stand
optax.MultiSteps and optax.microbatching, JAX's own recipe of `reduced` parameters and `unreduced`
gradients on Explicit axes, a hand-written shard_map loop, and `limit`, which takes the k gradients
and neither sums nor reduces them. Expected on 2 CPU cores with jax 0.10.2 or newer: the naive step
takes at least 4 times as long as gradaccum's, the shard_map loop about 1.4 times, the limit as
long. A run with jax 0.10.2 at a load average of 2 to 4 gave 4.79, 1.45 and 0.98, in 97 s. The load
average is printed because on a busy machine single ratios mean little.

The same batch in other numbers of microbatches, and a picture of it all:

    python -m absl_apps.bench --sweep=4,16,64 --png=bench.png

A window of 8 calls: optax.MultiSteps in a jitted step against gradaccum.MultiSteps, both of adamw:

    python -m absl_apps.bench --problem=calls --grad_acc_steps=8 --n_layer=1 --donate

The parameters are two matrices of 512 x 2048, a call has 64 rows, and both donate parameters and
state. Expected: optax's 8 calls take at least 3 times as long; three runs at a load average of 2 to
4 gave 3.22 to 3.54. All-reduces and bytes are those of all 8 calls, 8 and 67,108,896 against 1 and
8,388,616: what gradaccum has in a branch counts once, since only the call that updates takes it.
--contenders=optax,plain,gradaccum adds gradaccum.MultiSteps with jit's gradients: 8 all-reduces as
well, but adamw in one call of 8.

With a communication hook in place of the all-reduce, beside one that communicates nothing:

    hooks=gradaccum,bf16_compress,fp16_compress,int8_quantize,powersgd,noop
    python -m absl_apps.bench --contenders=$hooks

At full size, compiled for a TPU v3-8 that need not be here (pip install -e '.[apps,aot-tpu]'):

    python -m absl_apps.bench --topology=v3:2x2 --d_model=2048 --n_layer=16

Nothing runs then: values are not compared, and times are 'not measured'. Expected: 64 * 16 = 1,024
all-reduces of gradients and 64 of the loss in the naive step, one gradient tree in gradaccum's.

With gradients split over the devices (zero2), or parameters too (fsdp), on one slice and on two:

    size='--d_model=2048 --n_layer=16 --contenders=gradaccum_by_value,gradaccum,zero2,fsdp'
    python -m absl_apps.bench --topology=v5e:2x4 $size
    python -m absl_apps.bench --topology=v5e:4x4 --num_slices=2 --dp=16 --batch_size=2048 $size

Expected peak memory of the gradients alone on v5e:2x4: 806 MB replicated (1,074 by value), 571 MB
zero2, 605 MB fsdp; of the step, which holds old and new parameters, 1,074, 806 and 605 MB; of one
that donates the old (--donate) 806, 537 and 571 MB. Between two slices each device sends its part
of the gradients once, 268,435,456 / 16 = 16,777,216 bytes, and 512 bytes of the loss.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from absl_apps import bench_chart, bench_flags, environment, flag_parsing, meshes
from absl_apps.bench_measure import TOLERANCES, Row, compile_row, program_sizes, run_rounds
from absl_apps.bench_problem import OURS, Problem
from absl_apps.bench_report import lost, markdown, summary
from gradaccum import aot, audit

########################################### The program ##########################################


def bench(FLAGS: flags.FlagValues) -> dict[str, Any]:  # noqa: N803
    """Run the whole program; return what --json holds."""
    problem = problem_of(FLAGS)
    jax.jit(lambda: 0).lower().compile()  # what only the first compilation costs
    load = [os.getloadavg()[0]]
    rows = compiled(FLAGS, problem)
    ours = [name for name, row in rows.items() if row.contender.ours]
    once = " in a branch (counts once)" if in_branch(FLAGS) else ""
    print(
        f"{', '.join(ours)}: one cross-device mean{once}, checked in the compiled program",
        flush=True,
    )

    differences = None
    if not FLAGS.topology:
        differences = run_rounds(rows, problem, FLAGS.rounds)
        load.append(os.getloadavg()[0])
        print_agreement(FLAGS, rows, differences, load)
    summaries = summaries_of(FLAGS, rows, problem)
    print_summaries(FLAGS, problem, summaries)
    swept = sweep(FLAGS, problem, summaries)
    sizes = sizes_of(FLAGS, problem) if FLAGS.program_size else {}

    here = environment.environment(problem.mesh)
    here["devices"]["ran"] = not FLAGS.topology
    results = {
        "flags": flag_parsing.chosen(FLAGS, bench_flags.GROUPS),
        **here,
        "gradient_bytes": problem.gradient_bytes,
        "load_average": load,
        "tolerance": TOLERANCES[FLAGS.dtype],
        "differences": differences,
        "contenders": summaries,
        "sweep": swept,
        "program_instructions": sizes,
    }
    if FLAGS.json:
        flag_parsing.write_json(FLAGS.json, results)
    if FLAGS.png:
        title = f"{problem.title}, {problem.mesh.size} {kind_of(problem)} devices"
        bench_chart.draw(summaries, swept, title, FLAGS.png)
    return results


def problem_of(FLAGS: flags.FlagValues) -> Problem:  # noqa: N803
    """Make the problem on its mesh, and print what it is."""
    axes = {meshes.REPLICA_AXIS: FLAGS.num_slices} if FLAGS.num_slices > 1 else {}
    axes[meshes.DATA_AXIS] = FLAGS.dp
    asked = f"--num_slices={FLAGS.num_slices} " if FLAGS.num_slices > 1 else ""
    asked += f"--dp={FLAGS.dp}"
    if FLAGS.topology:
        mesh = aot.tpu_mesh(FLAGS.topology, axes, num_slices=FLAGS.num_slices)
    else:
        mesh = meshes.make(axes, asked)
    problem = bench_flags.PROBLEMS[FLAGS.problem](
        mesh,
        FLAGS.grad_acc_steps,
        FLAGS.batch_size,
        FLAGS.d_model,
        FLAGS.n_layer,
        jnp.dtype(FLAGS.dtype),
        FLAGS.donate,
    )
    only = ", compiled for only" if FLAGS.topology else ""
    print(
        f"{problem.title}: a gradient tree is {problem.gradient_bytes:,} bytes\n"
        f"{mesh.devices.size} devices, {kind_of(problem)}{only}; "
        f"jax {jax.__version__}, Python {platform.python_version()}",
        flush=True,
    )
    return problem


def kind_of(problem: Problem) -> str:
    """Return the kind of the problem's devices."""
    return str(problem.mesh.devices.flat[0].device_kind)


def print_agreement(
    FLAGS: flags.FlagValues,  # noqa: N803
    rows: Mapping[str, Row],
    differences: Mapping[str, Mapping[str, float]],
    load: Sequence[float],
) -> None:
    """Print how far the contenders' values are from ours; those of lossy ones apart."""
    lossy = [name for name, row in rows.items() if row.contender.tolerance is not None]
    exact = [d for name, d in differences.items() if name not in lossy]
    worst = {key: max(d[key] for d in exact) for key in ("loss", "update")}
    print(
        f"values agree: loss within {worst['loss']:.1g}, update within {worst['update']:.1g} "
        f"of {OURS}'s (at most {TOLERANCES[FLAGS.dtype]:g})\n"
        f"{''.join(lost(name, differences[name], rows[name]) for name in lossy)}"
        f"{FLAGS.rounds} rounds; load average {load[0]:.1f} before, {load[1]:.1f} after, on "
        f"{os.cpu_count()} cores",
        flush=True,
    )


def print_summaries(
    FLAGS: flags.FlagValues,  # noqa: N803
    problem: Problem,
    summaries: Mapping[str, Mapping[str, Any]],
) -> None:
    """Print the table, and what each contender communicates beside all-reduces."""
    print(f"\n{markdown(summaries, problem.gradient_bytes, problem.unit)}\n", flush=True)
    for name, s in summaries.items():
        if others := s["other_collective_bytes"]:
            text = ", ".join(f"{kind} {size:,} bytes" for kind, size in others.items())
            print(f"{name} a {problem.unit} also: {text}")
    if FLAGS.num_slices > 1:
        shard = problem.gradient_bytes // FLAGS.dp
        for name, s in summaries.items():
            print(
                f"{name} a {problem.unit} between slices: {s['bytes_across_slices']:,} bytes a "
                f"device; a gradient tree / {FLAGS.dp} is {shard:,}"
            )


def sizes_of(FLAGS: flags.FlagValues, problem: Problem) -> dict[int, int]:  # noqa: N803
    """Return and print the instructions of our program by its number of microbatches."""
    build = bench_flags.CONTENDERS[FLAGS.problem][OURS]
    sizes = program_sizes(build, problem, bench_flags.PROGRAM_SIZES)
    same = "the same" if len(set(sizes.values())) == 1 else "NOT the same"
    text = ", ".join(f"{n:,} instructions at {k:,} microbatches" for k, n in sizes.items())
    print(f"program size of {OURS}: {text}: {same}", flush=True)
    return sizes


def compiled(FLAGS: flags.FlagValues, problem: Problem) -> dict[str, Row]:  # noqa: N803
    """Compile the contenders; raise AssertionError unless ours take one cross-device mean."""
    builders = bench_flags.CONTENDERS[FLAGS.problem]
    names = FLAGS.contenders or bench_flags.DEFAULTS[FLAGS.problem]
    rows = {name: compile_row(builders[name](problem), problem.mesh) for name in names}
    for row in rows.values():
        if row.contender.ours:
            audit.assert_one_reduction(
                row.program,
                axis_name=problem.axes,
                mesh=problem.mesh,
                conditional=in_branch(FLAGS),
            )
    return rows


def in_branch(FLAGS: flags.FlagValues) -> bool:  # noqa: N803
    """Whether our mean stands in a branch, which the call that updates takes."""
    return FLAGS.problem == "calls"


def summaries_of(
    FLAGS: flags.FlagValues,  # noqa: N803
    rows: Mapping[str, Row],
    problem: Problem,
) -> dict[str, dict[str, Any]]:
    """Return what --json holds of the contenders, by name."""
    size = problem.gradient_bytes
    return {name: summary(row, rows[OURS], size, FLAGS.num_slices) for name, row in rows.items()}


def sweep(
    FLAGS: flags.FlagValues,  # noqa: N803
    problem: Problem,
    measured: dict[str, dict[str, Any]],
) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the contenders' summaries at other numbers of microbatches, by these.

    Args:
      FLAGS: of the program.
      problem: at its own number.
      measured: the summaries at that one, which is not measured again.
    """
    found = {}
    for k in map(int, FLAGS.sweep or ()):
        if k == problem.grad_acc_steps:
            found[k] = measured
            continue
        resized = dataclasses.replace(problem, grad_acc_steps=k)
        rows = compiled(FLAGS, resized)
        if not FLAGS.topology:
            run_rounds(rows, resized, FLAGS.rounds)
        found[k] = summaries_of(FLAGS, rows, resized)
        table = markdown(found[k], problem.gradient_bytes, problem.unit)
        print(f"with {k:,} microbatches:\n{table}\n", flush=True)
    return found


def main(argv: list[str]) -> None:
    del argv  # bench_flags.parse has refused all but flags
    meshes.prepare_platform(flags.FLAGS.dp)
    meshes.first_query()
    try:
        bench(flags.FLAGS)
    except (ValueError, ArithmeticError, OSError) as error:
        sys.exit(f"bench: {error}")


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: bench_flags.parse(argv, flags.FLAGS, __doc__ or ""))
