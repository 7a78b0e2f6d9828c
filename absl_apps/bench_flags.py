"""The flags of absl_apps.bench; sizes have the names that the first seed gave them.

They are defined by a call, not by an import: another program's flags have the same names.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from absl import flags

from absl_apps import bench_calls, bench_hooks, bench_steps, flag_parsing
from absl_apps.bench_problem import OURS, Problem

PROBLEMS = {"steps": Problem, "calls": bench_calls.Calls}
CONTENDERS = {
    "steps": bench_steps.CONTENDERS | bench_hooks.CONTENDERS,
    "calls": bench_calls.CONTENDERS,
}
DEFAULTS = {"steps": bench_steps.DEFAULT, "calls": bench_calls.DEFAULT}
DTYPES = ["float32", "bfloat16"]
GROUPS = {  # the order of --help; a test keeps it complete
    "Step": (
        "problem",
        "grad_acc_steps",
        "batch_size",
        "d_model",
        "n_layer",
        "dp",
        "num_slices",
        "dtype",
    ),
    "Measurement": ("contenders", "rounds", "sweep", "program_size", "topology", "donate"),
    "Output": ("json", "png"),
}
PROGRAM_SIZES = 2, 1024  # microbatches for which gradaccum's program is to be equally long


def define(values: flags.FlagValues) -> None:
    """Define the program's flags, and the checks that need flags alone, on `values`."""

    def integer(name: str, default: int, text: str) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=1, flag_values=values)

    flags.DEFINE_enum(
        "problem",
        "steps",
        list(PROBLEMS),
        "steps: layers in a scan, sgd, all microbatches in one step. calls: MLPs, adamw, a window "
        "of calls with one microbatch each.",
        flag_values=values,
    )
    integer("grad_acc_steps", 64, "Microbatches a step, on each device; or calls a window.")
    integer("batch_size", 512, "Rows a step or window, over all devices and microbatches.")
    integer("d_model", 512, "Width of a layer; an MLP's inner width is four times as large.")
    integer("n_layer", 8, "Layers; or MLPs.")
    integer("dp", 8, "Data-parallel devices, of each slice; simulated without accelerators.")
    integer(
        "num_slices",
        1,
        "Slices joined by a slower network: with 2 or more, a second data axis. zero2 and fsdp "
        "split within a slice (HSDP), and what crosses slices is counted.",
    )
    flags.DEFINE_enum(
        "dtype",
        "float32",
        DTYPES,
        "Dtype of parameters and batch in the loss, and so of gradients, accumulator and wire; "
        "the optimizer's parameters are float32. (XLA's CPU sums bfloat16 as float32.)",
        flag_values=values,
    )
    names, default = (
        " or ".join(",".join(x[problem]) for problem in PROBLEMS) for x in (CONTENDERS, DEFAULTS)
    )
    flags.DEFINE_list(
        "contenders",
        None,
        f"What to compare, of {names}. If not given: {default}.",
        flag_values=values,
    )
    integer("rounds", 5, "Steps timed of each contender, after one that is not.")
    flags.DEFINE_list(
        "sweep",
        None,
        "Numbers of microbatches to measure as well, of the same batch, as 1,4,16,64. Default: "
        "none.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "program_size",
        True,
        f"Also compile {OURS} for {' and '.join(map(str, PROGRAM_SIZES))} microbatches.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "topology",
        None,
        "Compile for this TPU slice, as v3:2x2, instead of running on the devices here.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "donate",
        False,
        "Donate the parameters to the step, as a training loop does, and the optimizer's state; "
        "each step is then given copies, made before the clock starts.",
        flag_values=values,
    )
    flag_parsing.define_json(values, "File for all that was measured.")
    flag_parsing.define_file(values, "png", "File for a picture of it.")
    _define_checks(values)


def _define_checks(values: flags.FlagValues) -> None:
    factors = ["grad_acc_steps", "dp", "num_slices"]

    @flags.multi_flags_validator(["batch_size", *factors], flag_values=values)
    def _batch(sizes: dict[str, int]) -> bool:
        multiple = math.prod(sizes[name] for name in factors)
        if remainder := sizes["batch_size"] % multiple:
            below = sizes["batch_size"] - remainder
            raise flags.ValidationError(
                f"{sizes['batch_size']} rows are not divisible by {' * '.join(factors)} = "
                f"{' * '.join(str(sizes[name]) for name in factors)} = {multiple}; the nearest "
                f"that is: {f'{below} or ' if below else ''}{below + multiple}."
            )
        return True

    @flags.multi_flags_validator(["sweep", "batch_size", "dp", "num_slices"], flag_values=values)
    def _sweep(sizes: dict[str, Any]) -> bool:
        devices = sizes["dp"] * sizes["num_slices"]
        for text in sizes["sweep"] or ():
            k = int(text) if text.isdigit() else 0
            if not k or sizes["batch_size"] % (k * devices):
                raise flags.ValidationError(
                    f"{text!r} microbatches: needed is a number whose product with {devices} "
                    f"devices divides --batch_size={sizes['batch_size']}."
                )
        return True

    @flags.multi_flags_validator(["problem", "contenders"], flag_values=values)
    def _contenders(chosen: dict[str, Any]) -> bool:
        known, names = CONTENDERS[chosen["problem"]], chosen["contenders"]
        if names is None:
            return True
        unknown = [name for name in names if name not in known]
        if unknown or OURS not in names or len(set(names)) < len(names):
            problem = f"{', '.join(unknown)} unknown" if unknown else f"got {', '.join(names)}"
            raise flags.ValidationError(
                f"{problem}; choose of {', '.join(known)}, each once, and {OURS} among them: "
                "ratios are to it."
            )
        return True

    del _batch, _sweep, _contenders  # registered


parse = functools.partial(flag_parsing.parse, "bench", GROUPS, define)  # (argv, values, manual)
