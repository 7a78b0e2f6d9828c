"""The flags of an optimizer and its learning rate."""

from __future__ import annotations

from absl import flags

from absl_apps.optimizers import LEARNING_RATES, SCHEDULES

FLAGS = (
    "optimizer",
    "learning_rate",
    "schedule",
    "warmup_steps",
    "weight_decay",
    "clip_norm",
)


def define(values: flags.FlagValues) -> None:
    """Define them on `values`."""
    flags.DEFINE_enum(
        "optimizer",
        "adamw",
        sorted(LEARNING_RATES),
        "Optax optimizer, with optax's defaults but for adamw's b2=0.95 and sgd's momentum=0.9.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "learning_rate",
        None,
        "Peak learning rate. Default: "
        + ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())
        + ".",
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_enum(
        "schedule",
        SCHEDULES[0],
        SCHEDULES,
        "Learning rate after the warmup: a cosine or a line that ends, with the run, at a tenth of "
        "the peak, or the peak.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "warmup_steps",
        None,
        "Optimizer steps (not microbatches) of linear warmup, from peak / (warmup_steps + 1). "
        "Default: a tenth of --steps.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "weight_decay",
        None,
        "Weight decay of adamw (default 0.0001) and lion (default 0.001).",
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "clip_norm",
        1.0,
        "Global norm to which a step's mean gradient is clipped; 0: not at all.",
        lower_bound=0.0,
        flag_values=values,
    )
