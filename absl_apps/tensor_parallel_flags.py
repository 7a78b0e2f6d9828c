"""The flags of absl_apps.tensor_parallel: their groups, defaults, and what cannot be combined.

They are defined by a call, not by an import: other programs' flags have the same names.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from absl import flags

from absl_apps import flag_parsing, meshes
from absl_apps.meshes import DATA_AXIS
from absl_apps.tensor_parallel_models import MODEL_AXIS, MODELS, Sizes
from absl_apps.tensor_parallel_rules import RULES

# Largest difference of a gradient, of its leaf's largest entry: sums are taken in another order.
TOLERANCES = {"float32": 2e-5, "float64": 1e-12}

DEFAULT_MESHES = ("dp=1,mp=4", "dp=2,mp=4", "dp=4,mp=2", "dp=8,mp=1")
DEFAULT_MESH_OF = {"break_rule": "dp=2,mp=4", "topology": "dp=4,mp=2"}
GROUPS = {  # the order of --help; a test keeps it complete
    "Comparison": (
        "meshes",
        "models",
        "microbatches",
        "batch_size",
        "dtype",
        "tolerance",
        "check_vma",
        "seed",
    ),
    "Model": ("d_model", "n_layer", "n_head", "seq_len"),
    "Instead": ("break_rule", "topology"),
    "Output": ("json",),
}


def define(values: flags.FlagValues) -> None:
    """Define the program's flags, and the checks of each, on `values`."""

    def integer(name: str, default: int, text: str, lower_bound: int = 1) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=lower_bound, flag_values=values)

    special = ", ".join(f"with --{name} {mesh}" for name, mesh in DEFAULT_MESH_OF.items())
    flags.DEFINE_multi_string(
        "meshes",
        None,
        f"Meshes of a data and a model axis, as {DEFAULT_MESHES[1]}, separated by semicolons or "
        f"given again. If not given: {';'.join(DEFAULT_MESHES)}; {special}.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "models",
        None,
        f"What to compare, of {','.join(MODELS)}. If not given, all (of those that have what "
        "--break_rule breaks).",
        flag_values=values,
    )
    integer("microbatches", 4, "Forward and backward passes a call on each data device.")
    integer("batch_size", 32, "Sequences a call, over all data devices and microbatches.")
    flags.DEFINE_enum(
        "dtype", "float32", list(TOLERANCES), "Of everything computed.", flag_values=values
    )
    default = ", ".join(f"{limit:g} for {dtype}" for dtype, limit in TOLERANCES.items())
    flags.DEFINE_float(
        "tolerance",
        None,
        "Largest difference allowed between a sharded and an unsharded gradient, of the leaf's "
        f"largest entry. If not given: {default}.",
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "check_vma",
        False,
        "Let JAX check which values are replicated, and derive transposes from that (the operators "
        "are then casts and plain sums).",
        flag_values=values,
    )
    integer("seed", 0, "Seed of parameters and tokens.", 0)

    integer("d_model", 128, "Width of the residual stream.")
    integer("n_layer", 2, "Layers.")
    integer("n_head", 4, "Attention heads of the transformers; 2 * n_head divides d_model.")
    integer("seq_len", 32, "Bytes predicted per sequence.")

    flags.DEFINE_enum(
        "break_rule",
        None,
        list(RULES),
        "Show what goes wrong without a rule: no f before the columns (no_f), the row-sharded "
        "layer's bias added before the sum (bias_before_sum), jax.lax.psum in its place "
        "(plain_psum).",
        flag_values=values,
    )
    flags.DEFINE_string(
        "topology",
        None,
        "Compile for this TPU slice, as v5e:2x4, which need not be here; nothing runs.",
        flag_values=values,
    )
    flag_parsing.define_json(values, "File for all that was measured.")

    _validate(values)


def _validate(values: flags.FlagValues) -> None:
    """Register the checks that need little but one flag; `check` is for the rest."""

    @flags.validator("tolerance", "must be finite", flag_values=values)
    def _tolerance(limit: float | None) -> bool:
        return limit is None or math.isfinite(limit)

    @flags.validator("models", flag_values=values)
    def _models(names: list[str] | None) -> bool:
        unknown = [name for name in names or [] if name not in MODELS]
        if names is not None and (unknown or not names or len(set(names)) < len(names)):
            got = ", ".join(names) or "none"
            problem = f"{', '.join(unknown)} unknown" if unknown else f"got {got}"
            raise flags.ValidationError(f"{problem}; choose of {', '.join(MODELS)}, each once.")
        return True

    @flags.multi_flags_validator(["dtype", "topology"], flag_values=values)
    def _wide(chosen: dict[str, Any]) -> bool:
        if chosen["topology"] and chosen["dtype"] == "float64":
            raise flags.ValidationError(
                "a TPU takes no maximum over devices in float64, which the sharded cross entropy "
                "needs; leave out one of the two."
            )
        return True

    @flags.multi_flags_validator(["break_rule", "check_vma", "topology"], flag_values=values)
    def _broken(chosen: dict[str, Any]) -> bool:
        if chosen["break_rule"] and (chosen["check_vma"] or chosen["topology"]):
            other = "check_vma" if chosen["check_vma"] else "topology"
            raise flags.ValidationError(
                f"--break_rule runs here, with types unchecked; leave out --{other}."
            )
        return True

    del _tolerance, _models, _wide, _broken  # registered


def check(chosen: dict[str, Any]) -> None:
    """Raise ValueError unless every model runs on every mesh; what needs several flags at once."""
    models, rule = chosen_models(chosen), chosen["break_rule"]
    if rule and RULES[rule].needs_bias:
        for name, model in models.items():
            if not model.has_bias:
                raise ValueError(
                    f"--break_rule={rule}: {name} has no bias; leave it out of --models."
                )
    for text, axes in chosen_meshes(chosen).items():
        asked, shards = f"--meshes={text}", axes[MODEL_AXIS]
        if rule and shards < 2:
            raise ValueError(f"{asked}: with one device along {MODEL_AXIS} no rule can be broken.")
        for model in models.values():
            try:
                model.check(shards)
            except ValueError as error:
                raise ValueError(f"{asked}: {error}") from None
        _check_batch(asked, chosen["batch_size"], chosen["microbatches"], axes[DATA_AXIS])


def _check_batch(asked: str, batch_size: int, microbatches: int, devices: int) -> None:
    multiple = microbatches * devices
    if remainder := batch_size % multiple:
        below = batch_size - remainder
        raise ValueError(
            f"{asked}: --batch_size={batch_size} is not divisible by microbatches * {DATA_AXIS} = "
            f"{microbatches} * {devices} = {multiple}; the nearest that is: "
            f"{f'{below} or ' if below else ''}{below + multiple}."
        )


def sizes(chosen: dict[str, Any]) -> Sizes:
    """Return the sizes of the models."""
    return Sizes(*(chosen[name] for name in ("d_model", "n_layer", "n_head", "seq_len", "dtype")))


def chosen_models(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the models, by name; ValueError where the sizes make none."""
    built = {name: MODELS[name](sizes(chosen)) for name in chosen["models"] or MODELS}
    rule = chosen["break_rule"]
    if chosen["models"] is None and rule and RULES[rule].needs_bias:
        return {name: model for name, model in built.items() if model.has_bias}
    return built


def chosen_meshes(chosen: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the axes of each mesh, by the text that asks for it; ValueError where one is odd."""
    given = chosen["meshes"]
    if given is None:
        special = [mesh for name, mesh in DEFAULT_MESH_OF.items() if chosen[name]]
        given = special or DEFAULT_MESHES
    found = {}
    for text in (part.strip() for several in given for part in several.split(";")):
        try:
            found[text] = meshes.parse(text)
        except ValueError:
            found[text] = {}
        if list(found[text]) != [DATA_AXIS, MODEL_AXIS]:
            raise ValueError(
                f"--meshes={text}: needed sizes >= 1 of {DATA_AXIS} and {MODEL_AXIS}, in this "
                f"order; write for example --meshes='{';'.join(DEFAULT_MESHES[1:3])}'."
            )
    return found


# (argv, values, manual)
parse = functools.partial(flag_parsing.parse, "tensor_parallel", GROUPS, define)
