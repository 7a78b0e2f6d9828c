"""Find the fewest microbatches with which absl_apps.train fits in a device's memory.

    pip install -e '.[apps,aot-tpu]'
    python -m absl_apps.plan --topology=v5e:2x4 --d_model=1024 --n_layer=24 --n_head=16 \
        --seq_len=1024 --global_batch=2048 --hbm_gb=16

The step is compiled, for devices that need not be here, with some of the numbers of microbatches
that divide the batch of a device; nothing runs. Printed is what was tried, by the compiler's own
peak memory: the answer fits, the next fewer does not. The limit is --hbm_gb, or else the device's
own. The same search is `--microbatches=auto` of absl_apps.train. Expected: 8 microbatches, a peak
of 10,825,442,816 bytes; 4 would take 16,335,053,824. About a minute on 2 cores.

For GPUs (pip install -e '.[apps,aot-gpu]'), two hosts of eight:

    python -m absl_apps.plan --gpu=H100 --hosts=2 --mesh=replica=2,dp=8 --zero=3

On the devices here, simulated CPUs where there is nothing else, which have no limit of their own:

    python -m absl_apps.plan --hbm_gb=0.05
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

from absl import app, flags

from absl_apps import (
    environment,
    flag_parsing,
    meshes,
    microbatch_flags,
    targets,
    train_checks,
    train_flags,
    train_program,
)

# What a step compiles to does not depend on these flags of absl_apps.train.
_LEFT_OUT = ("Data", "Held-out data", "Processes", "Output")
_NOT_ASKED = {
    *("steps", "microbatches", "hbm_gb", "on_nonfinite"),
    *("learning_rate", "schedule", "warmup_steps", "weight_decay"),
}

GROUPS = {
    title: tuple(name for name in names if name not in _NOT_ASKED)
    for title, names in train_flags.GROUPS.items()
    if title not in _LEFT_OUT
} | {"Compiled for": targets.FLAGS, "Plan": ("hbm_gb", "json")}
GROUPS["Model"] = ("vocab_size", *GROUPS["Model"])


def define(values: flags.FlagValues) -> None:
    """Define the program's flags: of absl_apps.train those that a step's program depends on."""
    train_flags.define(values)
    known = {name for names in GROUPS.values() for name in names}
    for name in {name for names in train_flags.GROUPS.values() for name in names} - known:
        delattr(values, name)
    for name in values:  # no check of a flag that is gone
        flag = values[name]
        flag.validators = [x for x in flag.validators if known.issuperset(x.get_flags_names())]
    targets.define(values)
    flag_parsing.define_json(values, "File for the plan, as JSON.")


def plan(FLAGS: flags.FlagValues) -> dict[str, Any]:  # noqa: N803
    """Run the whole program; return what --json holds."""
    chosen = flag_parsing.chosen(FLAGS, GROUPS)
    axes = meshes.parse(FLAGS.mesh) if FLAGS.mesh else targets.default_axes(FLAGS)
    config = train_program.model(chosen)
    train_checks.check_model_axis(axes, config, FLAGS.seq_len, FLAGS.sequence_parallel)
    text = ",".join(f"{axis}={size}" for axis, size in axes.items())
    mesh = targets.make_mesh(FLAGS, axes, f"--mesh={text}")
    limit = microbatch_flags.memory_limit(FLAGS.hbm_gb)
    kind = mesh.devices.flat[0].device_kind
    print(
        f"{mesh.size:,} devices, {kind}, mesh {text}"
        f"{', compiled for only' if targets.elsewhere(FLAGS) else ''}; "
        f"ZeRO stage {train_checks.stage(FLAGS.zero, axes)}\n"
        f"batch: {FLAGS.global_batch:,} sequences of {FLAGS.seq_len:,} tokens",
        flush=True,
    )
    found = train_program.plan(chosen, mesh, limit)
    print(f"\n{found}\n")
    print(
        f"--microbatches={found.microbatches}: the fewest that fit, "
        f"{found.peak_bytes:,} of {found.memory_limit:,} bytes"
    )
    results = {
        "flags": chosen,
        **environment.environment(mesh),
        "mesh": dict(mesh.shape),
        "plan": dataclasses.asdict(found),
    }
    if FLAGS.json:
        flag_parsing.write_json(FLAGS.json, results)
    return results


def main(argv: list[str]) -> None:
    del argv  # parse has refused all but flags
    meshes.prepare_platform(flags.FLAGS.cpu_devices)
    meshes.first_query()
    try:
        plan(flags.FLAGS)
    except (ValueError, OSError) as error:
        sys.exit(f"plan: {error}")


parse = functools.partial(flag_parsing.parse, "plan", GROUPS, define)  # (argv, values, manual)

if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: parse(argv, flags.FLAGS, __doc__ or ""))
