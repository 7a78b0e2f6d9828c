"""The flags of absl_apps.train: their groups, units, defaults, and what cannot be combined.

They are defined by a call, not by an import: another program that imports this one, or has a
flag of the same name, is not disturbed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

from absl import flags

from absl_apps import cluster, comm_hooks, flag_parsing, meshes, microbatch_flags, transformer
from absl_apps.meshes import DATA_AXIS, MODEL_AXIS, REPLICA_AXIS

# How parameters, and gradients with the optimizer's state, lie on the data axes.
SHARDINGS = ("replicated", "zero", "fsdp")

# Peak learning rates that suit the default sizes, by optimizer.
LEARNING_RATES = {"adamw": 3e-3, "lion": 2e-3, "sgd": 0.3}

# The order of --help; a test keeps it complete.
GROUPS = {
    "Data": ("data", "max_data_bytes", "seed"),
    "Model": ("d_model", "n_layer", "n_head", "seq_len", "compute_dtype"),
    "Optimization": (
        "steps",
        "global_batch",
        "microbatches",
        "hbm_gb",
        "optimizer",
        "learning_rate",
        "warmup_steps",
        "comm_hook",
    ),
    "Devices": ("mesh", "sharding", "sequence_parallel", "cpu_devices"),
    "Processes": cluster.FLAGS,
    "Output": ("workdir", "profile_steps"),
}

# What the processes of one run may differ in: where things are, and how they found each other.
OWN = {"data", "workdir", "cpu_devices", *cluster.FLAGS}


def define(values: flags.FlagValues) -> None:
    """Define every flag of the program, and the checks that need flags alone, on `values`."""

    def integer(name: str, default: int | None, text: str, lower_bound: int = 1) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=lower_bound, flag_values=values)

    flags.DEFINE_multi_string(
        "data",
        None,
        "Text files or globs (** descends), separated by commas or given again. Default: the "
        "Python standard library's own *.py files, in the order of their names.",
        flag_values=values,
    )
    integer("max_data_bytes", 8_000_000, "Bytes of text to read at most, from the start.")
    integer("seed", 0, "Seed of the parameters and, with the step, of each batch.", 0)

    integer("d_model", 128, "Width of the residual stream.")
    integer("n_layer", 4, "Layers.")
    integer("n_head", 4, "Attention heads; 2 * n_head divides d_model.")
    integer("seq_len", 128, "Bytes predicted per sequence.")
    flags.DEFINE_enum(
        "compute_dtype",
        "bfloat16",
        ["bfloat16", "float32"],
        "Dtype inside the layers; parameters, gradients and the loss are float32.",
        flag_values=values,
    )

    integer("steps", 150, "Optimizer steps.")
    integer("global_batch", 64, "Sequences per step, over all devices and microbatches.")
    microbatch_flags.define(values, 4)
    flags.DEFINE_enum(
        "optimizer",
        "adamw",
        sorted(LEARNING_RATES),
        "Optax optimizer, with optax's defaults but for adamw's b2=0.95 and sgd's momentum=0.9; "
        "gradients are clipped to global norm 1.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "learning_rate",
        None,
        "Peak learning rate; a cosine takes it to a tenth at the last step. Default: "
        + ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())
        + ".",
        lower_bound=0.0,
        flag_values=values,
    )
    integer(
        "warmup_steps",
        None,
        "Optimizer steps (not microbatches) of linear warmup, from peak / (warmup_steps + 1). "
        "Default: a tenth of --steps.",
        0,
    )
    flags.DEFINE_string(
        "comm_hook",
        None,
        "Communication hook that takes the mean, with its fields, as bf16_compress, "
        "int8_quantize:error_feedback=True, powersgd:rank=4,start_step=20 or "
        f"gradient_noise_scale:hook=bf16_compress; of {', '.join(comm_hooks.NAMES)}. "
        "Default: none, an all-reduce.",
        flag_values=values,
    )

    flags.DEFINE_string(
        "mesh",
        None,
        f"Devices along the data axis, as {DATA_AXIS}=8, or along two, as {REPLICA_AXIS}=2,"
        f"{DATA_AXIS}=4; and last, along the model axis, over which heads, hidden features and "
        f"vocabulary are sharded, as {DATA_AXIS}=4,{MODEL_AXIS}=2 or {REPLICA_AXIS}=2,{DATA_AXIS}=2"
        f",{MODEL_AXIS}=2. Default: {DATA_AXIS}, all there are.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "sharding",
        SHARDINGS[0],
        SHARDINGS,
        "Whether every device holds all parameters, gradients and optimizer state (replicated), a "
        "part of the gradients and optimizer state (zero), or of the parameters too (fsdp). Parts "
        f"are split over {DATA_AXIS} alone: with {REPLICA_AXIS}, its devices hold copies (HSDP). "
        f"With {MODEL_AXIS}, all this is said of a device's shard of the model.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "sequence_parallel",
        False,
        "Whether activations between the layers, which all devices along "
        f"{MODEL_AXIS} otherwise hold whole, are sharded over it along the sequence.",
        flag_values=values,
    )
    integer(
        "cpu_devices",
        8,
        "Simulated CPU devices of each process, on a machine without accelerators.",
    )

    cluster.define(values)

    flags.DEFINE_string(
        "workdir",
        None,
        "Directory of this run's metrics.jsonl and run.json, made if missing; another run's "
        "is refused. Default: a new one, runs/<date>-<time>. Of several processes, process 0 alone "
        "writes these two.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "profile_steps",
        None,
        "Steps to profile, as 10:15 for 10 to 14, counted from 0; into profile/ of --workdir, by "
        "each process on its own host, for XProf.",
        flag_values=values,
    )

    @flags.multi_flags_validator(["d_model", "n_layer", "n_head"], flag_values=values)
    def _model(sizes: dict[str, int]) -> bool:
        return _valid(lambda: transformer.Config(**sizes))

    @flags.validator("mesh", flag_values=values)
    def _mesh(text: str | None) -> bool:
        return text is None or _valid(lambda: check_axes(meshes.parse(text)))

    @flags.validator("learning_rate", "must be finite", flag_values=values)
    def _rate(rate: float | None) -> bool:
        return rate is None or math.isfinite(rate)

    @flags.validator("comm_hook", flag_values=values)
    def _comm_hook(text: str | None) -> bool:
        return text is None or _valid(lambda: comm_hooks.parse(text))

    @flags.multi_flags_validator(["warmup_steps", "steps"], flag_values=values)
    def _warmup(steps: dict[str, int | None]) -> bool:
        if steps["warmup_steps"] is not None and steps["warmup_steps"] > steps["steps"]:
            raise flags.ValidationError(
                f"{steps['warmup_steps']} warmup steps do not fit in {steps['steps']} steps; "
                "both count optimizer steps."
            )
        return True

    @flags.multi_flags_validator(["profile_steps", "steps"], flag_values=values)
    def _profile(given: dict[str, Any]) -> bool:
        text = given["profile_steps"]
        return text is None or _valid(lambda: check_profile(text, given["steps"]))

    del _model, _mesh, _rate, _comm_hook, _warmup, _profile  # registered


def agreed(values: flags.FlagValues) -> dict[str, Any]:
    """Return the flags that all processes of a run must be given alike, by how they are written."""
    chosen = flag_parsing.chosen(values, GROUPS)
    return {f"--{name}": value for name, value in chosen.items() if name not in OWN}


def parse_steps(text: str) -> range:
    """Return the steps of `"10:15"`: 10, 11, 12, 13 and 14.

    Raises:
      ValueError: unless the text is two numbers, the first the smaller.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"{text!r} is not start:stop with start < stop; write for example 10:15.")
    return range(int(match[1]), int(match[2]))


def check_profile(text: str, steps: int) -> None:
    """Raise ValueError unless all steps to profile are taken."""
    profiled = parse_steps(text)
    if profiled.stop > steps:
        raise ValueError(
            f"step {profiled.stop - 1} is not taken: they count from 0, and --steps={steps} end "
            f"with {steps - 1}."
        )


def check_axes(axes: dict[str, int]) -> None:
    """Raise ValueError unless the mesh has the axes that this program knows, in their order."""
    data = [axis for axis in axes if axis != MODEL_AXIS]
    write = (
        f"write --mesh={DATA_AXIS}=8, --mesh={REPLICA_AXIS}=2,{DATA_AXIS}=4 or "
        f"--mesh={DATA_AXIS}=4,{MODEL_AXIS}=2."
    )
    if data not in ([DATA_AXIS], [REPLICA_AXIS, DATA_AXIS]):
        raise ValueError(
            f"axes {', '.join(axes)}, but this program splits the batch over {DATA_AXIS}, or "
            f"{REPLICA_AXIS} and {DATA_AXIS}: {write}"
        )
    if MODEL_AXIS in axes and list(axes)[-1] != MODEL_AXIS:
        raise ValueError(
            f"axes {', '.join(axes)}, but the model axis {MODEL_AXIS} is to be the last, so that "
            f"its devices, which communicate in every layer, are neighbours: {write}"
        )


def check_model_axis(
    axes: dict[str, int], config: transformer.Config, seq_len: int, sequence_parallel: bool
) -> None:
    """Raise ValueError unless the model axis, where there is one, divides what it is to split."""
    shards = axes.get(MODEL_AXIS)
    if shards is not None:
        transformer.check_shards(config, shards, MODEL_AXIS)
    if not sequence_parallel:
        return
    if shards is None:
        raise ValueError(
            f"--sequence_parallel: there is no axis {MODEL_AXIS} to shard the sequence over; write "
            f"for example --mesh={DATA_AXIS}=4,{MODEL_AXIS}=2."
        )
    if seq_len % shards:
        below = seq_len - seq_len % shards
        nearest = f"{below} or {below + shards}" if below else f"{shards}"
        raise ValueError(
            f"--sequence_parallel: --seq_len={seq_len} is not divisible by the {shards} devices "
            f"along {MODEL_AXIS}; the nearest that is: {nearest}."
        )


def check_batch(global_batch: int, microbatches: int, data_devices: int) -> None:
    """Raise ValueError unless all devices along the data axes get the same whole microbatches."""
    multiple = microbatches * data_devices
    if global_batch % multiple:
        below = global_batch - global_batch % multiple
        nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
        raise ValueError(
            f"--global_batch={global_batch}: not divisible by microbatches * devices "
            f"= {microbatches} * {data_devices} = {multiple}; the nearest that is: {nearest}."
        )


def _valid(check: Callable[[], object]) -> bool:
    try:
        check()
    except ValueError as error:
        raise flags.ValidationError(str(error)) from None
    return True


parse = functools.partial(flag_parsing.parse, "train", GROUPS, define)  # (argv, values, manual)
