"""The flags of absl_apps.audit: sizes as absl_apps.bench and absl_apps.train name them.

They are defined by a call, not by an import: another program's flags have the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from absl import flags

from absl_apps import audit_file, bench_flags, flag_parsing, meshes, targets, train_flags

SEED, TRAIN = "seed", "train"
# What both programs have, at sizes of their own.
DEFAULTS = {
    SEED: {"d_model": 2048, "n_layer": 16},
    TRAIN: {"d_model": 128, "n_layer": 4},  # a test holds them to absl_apps.train's
}
OF_BOTH = ("d_model", "n_layer")
OF_SEED = ("grad_acc_steps", "batch_size", "dtype", "donate")
OF_TRAIN = (
    "n_head",
    "seq_len",
    "vocab_size",
    "dropout",
    "compute_dtype",
    "remat",
    "global_batch",
    "every_k",
    "microbatches",
    "hbm_gb",
    "optimizer",
    "zero",
    "sequence_parallel",
    "comm_hook",
    "reduce_dtype",
)
OF_FILE = ("axis_name", "conditional")
GROUPS = {  # the order of --help; a test keeps it complete
    "Program": ("program", "check"),
    "Of seed and train": OF_BOTH,
    "Of seed": OF_SEED,
    "Of train": OF_TRAIN,
    "Of FILE.py:function": OF_FILE,
    "Devices": ("mesh", *targets.FLAGS, "cpu_devices"),
    "Output": ("json",),
}


def define(values: flags.FlagValues) -> None:
    """Define the program's flags, and the checks that need flags alone, on `values`."""
    flags.DEFINE_string(
        "program",
        SEED,
        f"{SEED}: the first seed's step; {TRAIN}: absl_apps.train's; FILE.py:function: your own.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "check",
        False,
        "Exit with 1 where the program is not one cross-device mean: your own, or gradaccum's of "
        f"{SEED} and {TRAIN}.",
        flag_values=values,
    )
    _define_sizes(values)
    flags.DEFINE_list(
        "axis_name",
        None,
        f"Data axes of the mesh, by comma. Default: all but {meshes.MODEL_AXIS}.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "conditional",
        False,
        "The one mean may stand in a branch, as that of gradaccum.MultiSteps does.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "mesh",
        None,
        "Sizes by axis, as dp=8 or replica=2,dp=4,mp=2. Default: dp, all devices of a slice or "
        "server; several slices or hosts are replica around it.",
        flag_values=values,
    )
    targets.define(values)
    flag_parsing.define_json(values, "File for all that is printed, and more.")

    @flags.validator("program", flag_values=values)
    def _program(text: str) -> bool:
        return text in DEFAULTS or _valid(lambda: audit_file.split(text))

    @flags.validator("mesh", flag_values=values)
    def _mesh(text: str | None) -> bool:
        return text is None or _valid(lambda: meshes.parse(text))

    del _program, _mesh  # registered


def _define_sizes(values: flags.FlagValues) -> None:
    """Take over the flags of the other programs, with their words, checks and defaults."""
    seeds, trains = flags.FlagValues(), flags.FlagValues()
    bench_flags.define(seeds)
    train_flags.define(trains)
    for name in OF_BOTH:
        default = " or ".join(f"{DEFAULTS[program][name]} for {program}" for program in DEFAULTS)
        flags.DEFINE_integer(
            name,
            None,
            f"{trains[name].help} Default: {default}.",
            lower_bound=1,
            flag_values=values,
        )
    flags.DEFINE_integer(
        "batch_size",
        None,
        "Rows a step, over all devices and microbatches. Default: a row a microbatch on each "
        "device.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "donate",
        False,
        "Donate the parameters to the step, and optax.MultiSteps' state, as a training loop does.",
        flag_values=values,
    )
    for given, names in (
        (seeds, ("grad_acc_steps", "dtype")),
        (trains, (*OF_TRAIN, "cpu_devices")),
    ):
        for name in names:
            flag = given[name]
            flag.validators = [check for check in flag.validators if _alone(check, name)]
            values[name] = flag


def _alone(check: Any, name: str) -> bool:
    """Whether a check is of this flag and no other, which may not be taken over."""
    return list(check.get_flags_names()) == [name]


def chosen(values: flags.FlagValues) -> dict[str, Any]:
    """Return every flag by name, sizes without a value at the program's default.

    Raises:
      ValueError: a flag is given that is not the program's.
    """
    program = values.program
    own = {SEED: OF_BOTH + OF_SEED, TRAIN: OF_BOTH + OF_TRAIN}.get(program, OF_FILE)
    foreign = [
        name
        for name in (*OF_BOTH, *OF_SEED, *OF_TRAIN, *OF_FILE)
        if name not in own and values[name].present
    ]
    if foreign:
        raise ValueError(
            f"{', '.join(f'--{name}' for name in foreign)}: not of --program={program}, whose own "
            f"are {', '.join(f'--{name}' for name in own)}."
        )
    default: Mapping[str, Any] = DEFAULTS.get(program, {})
    named = flag_parsing.chosen(values, GROUPS)
    return named | {name: default[name] for name in default if named[name] is None}


def _valid(check: Any) -> bool:
    try:
        check()
    except ValueError as error:
        raise flags.ValidationError(str(error)) from None
    return True


parse = functools.partial(flag_parsing.parse, "audit", GROUPS, define)  # (argv, values, manual)
