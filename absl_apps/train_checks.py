"""What flags of absl_apps.train cannot be combined, and why: each mistake is one line.

Some checks need flags alone, and are their validators; others the devices or the data too, and are
made at the start of a run. absl_apps.plan and absl_apps.audit make the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from absl_apps import comm_hooks, meshes, microbatch_flags, transformer
from absl_apps.meshes import DATA_AXIS, FSDP_AXIS, MODEL_AXIS, REPLICA_AXIS

_TOKENS = 1 << 16  # that uint16 holds
_LARGEST = (2 - 2**-23) * 2.0**127  # that float32 holds
_WRITE = (
    f"write --mesh={DATA_AXIS}=8, --mesh={FSDP_AXIS}=8, --mesh={REPLICA_AXIS}=2,{FSDP_AXIS}=4 or "
    f"--mesh={DATA_AXIS}=4,{MODEL_AXIS}=2."
)


def register(values: flags.FlagValues) -> None:
    """Let `values` refuse what cannot be, as soon as it is read, with the reason."""

    def together(names: tuple[str, ...], check: Callable[..., object]) -> None:
        flags.register_multi_flags_validator(
            names, lambda given: _valid(lambda: check(**given)), flag_values=values
        )

    def alone(name: str, check: Callable[[Any], object]) -> None:
        flags.register_validator(
            name, lambda x: x is None or _valid(lambda: check(x)), flag_values=values
        )

    def written(names: tuple[str, ...], check: Callable[..., object]) -> None:
        """As `together`, with None for what is not written: a default contradicts nothing."""
        together(
            names,
            lambda **given: check(
                **{k: None if values[k].using_default_value else x for k, x in given.items()}
            ),
        )

    alone("mesh", lambda text: check_axes(meshes.parse(text)))
    alone("comm_hook", comm_hooks.parse)
    alone("dropout", check_part)
    alone("eval_fraction", check_part)
    for name in ("learning_rate", "weight_decay", "clip_norm"):
        alone(name, check_finite)
    together(("d_model", "n_layer", "n_head"), transformer.Config)
    together(("vocab_size", "document_end"), check_tokens)
    written(("eval_data", "eval_fraction", "eval_every"), check_held_out)
    written(("keep", "checkpoint_every"), check_kept)
    together(("warmup_steps", "steps"), check_warmup)
    together(("profile_steps", "steps"), check_profile)
    together(("microbatches", "hbm_gb"), microbatch_flags.check)
    together(("optimizer", "weight_decay"), check_decay)
    together(("zero", "mesh"), check_zero)
    together(("reduce_dtype", "comm_hook", "every_k"), check_reduction)


def _valid(check: Callable[[], object]) -> bool:
    try:
        check()
    except ValueError as error:
        raise flags.ValidationError(str(error)) from None
    return True


############################################# Values #############################################


def check_finite(x: float) -> None:
    """Raise ValueError at NaN, and at what is infinite in float32, which no lower bound stops."""
    if not abs(x) <= _LARGEST:
        raise ValueError("must be finite, in float32.")


def check_part(part: float) -> None:
    """Raise ValueError unless a part is left when this one is taken away."""
    if not 0 <= part < 1:
        raise ValueError(f"{part:g} is no part of a whole: 0 <= part < 1.")


def check_tokens(vocab_size: int | None, document_end: int | None) -> None:
    """Raise ValueError unless tokens fit in uint16, and the one that ends documents is one."""
    if vocab_size is not None and vocab_size > _TOKENS:
        raise ValueError(
            f"--vocab_size={vocab_size}: token files are of uint16, which holds {_TOKENS} tokens."
        )
    if document_end is not None and vocab_size is None:
        raise ValueError(
            f"--document_end={document_end} is of token files, which need --vocab_size; in text, "
            "files end documents."
        )
    if document_end is not None and vocab_size is not None and document_end >= vocab_size:
        raise ValueError(
            f"--document_end={document_end} is none of the tokens 0 to {vocab_size - 1} of "
            f"--vocab_size={vocab_size}."
        )


def check_held_out(
    eval_data: list[str] | None, eval_fraction: float | None, eval_every: int | None
) -> None:
    """Raise ValueError where data is held out twice, or none of which a loss is asked for."""
    if eval_data and eval_fraction:
        raise ValueError(
            f"--eval_fraction={eval_fraction:g} beside --eval_data: of --data nothing is held out "
            "then; give one of them."
        )
    if not eval_data and eval_fraction == 0 and eval_every:
        raise ValueError(
            f"--eval_every={eval_every} beside --eval_fraction=0: nothing is held out; leave one "
            "of them out, or give --eval_data."
        )


def check_kept(keep: int | None, checkpoint_every: int | None) -> None:
    """Raise ValueError where no checkpoint is to be written, and one every so many steps is."""
    if keep == 0 and checkpoint_every:
        raise ValueError(
            f"--checkpoint_every={checkpoint_every} beside --keep=0: none is written; keep 1 or "
            "more, or leave it out."
        )


def check_decay(optimizer: str, weight_decay: float | None) -> None:
    """Raise ValueError where the optimizer has no weight decay."""
    if optimizer == "sgd" and weight_decay:
        raise ValueError(f"--weight_decay={weight_decay:g}: sgd has none; take adamw or lion.")


############################################# Steps ##############################################


def parse_steps(text: str) -> range:
    """Return the steps of `"10:15"`: 10, 11, 12, 13 and 14.

    Raises:
      ValueError: unless the text is two numbers, the first the smaller.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"{text!r} is not start:stop with start < stop; write for example 10:15.")
    return range(int(match[1]), int(match[2]))


def check_profile(profile_steps: str | None, steps: int) -> None:
    """Raise ValueError unless all steps to profile are taken."""
    if profile_steps is None:
        return
    profiled = parse_steps(profile_steps)
    if profiled.stop > steps:
        raise ValueError(
            f"step {profiled.stop - 1} is not taken: they count from 0, and --steps={steps} end "
            f"with {steps - 1}."
        )


def check_warmup(warmup_steps: int | None, steps: int) -> None:
    """Raise ValueError unless the warmup ends with the run, or before."""
    if warmup_steps is not None and warmup_steps > steps:
        raise ValueError(
            f"{warmup_steps} warmup steps do not fit in {steps} steps; both count optimizer steps."
        )


def check_batch(global_batch: int, every_k: int, microbatches: int, data_devices: int) -> None:
    """Raise ValueError unless all devices along the data axes get the same whole microbatches."""
    multiple = every_k * microbatches * data_devices
    if global_batch % multiple:
        below = global_batch - global_batch % multiple
        nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
        calls = ("every_k * ", f"{every_k} * ") if every_k > 1 else ("", "")
        raise ValueError(
            f"--global_batch={global_batch}: not divisible by {calls[0]}microbatches * devices "
            f"= {calls[1]}{microbatches} * {data_devices} = {multiple}; the nearest that is: "
            f"{nearest}."
        )


############################################# Devices ############################################


def check_axes(axes: Mapping[str, int]) -> None:
    """Raise ValueError unless the mesh has the axes that this program knows, in their order."""
    data = [axis for axis in axes if axis != MODEL_AXIS]
    known = [[DATA_AXIS], [FSDP_AXIS], [REPLICA_AXIS, DATA_AXIS], [REPLICA_AXIS, FSDP_AXIS]]
    if data not in known:
        raise ValueError(
            f"axes {', '.join(axes)}, but this program splits the batch over {DATA_AXIS} or "
            f"{FSDP_AXIS}, alone or inside {REPLICA_AXIS}: {_WRITE}"
        )
    if MODEL_AXIS in axes and list(axes)[-1] != MODEL_AXIS:
        raise ValueError(
            f"axes {', '.join(axes)}, but the model axis {MODEL_AXIS} is to be the last, so that "
            f"its devices, which communicate in every layer, are neighbours: {_WRITE}"
        )


def stage(zero: int | None, axes: Mapping[str, int]) -> int:
    """Return the ZeRO stage: what was asked for, else 3 along an axis that is named for it."""
    return (3 if FSDP_AXIS in axes else 0) if zero is None else zero


def check_zero(zero: int | None, mesh: str | None) -> None:
    """Raise ValueError where nothing is split over an axis that is named for it."""
    if zero == 0 and mesh is not None and FSDP_AXIS in meshes.parse(mesh):
        raise ValueError(
            f"--zero=0 splits nothing over the axis {FSDP_AXIS}; call it {DATA_AXIS}, or take "
            "--zero=1, 2 or 3."
        )


def check_model_axis(
    axes: Mapping[str, int], config: transformer.Config, seq_len: int, sequence_parallel: bool
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


########################################## Communication #########################################


def check_reduction(reduce_dtype: str | None, comm_hook: str | None, every_k: int) -> None:
    """Raise ValueError where something else than --reduce_dtype says what travels."""
    if reduce_dtype is None:
        return
    hook = "bf16_compress" if reduce_dtype == "bfloat16" else "fp16_compress"
    if comm_hook is not None:
        raise ValueError(
            f"--reduce_dtype={reduce_dtype} beside --comm_hook={comm_hook}: the hook says what "
            "travels; give one of them."
        )
    if every_k > 1:
        raise ValueError(
            f"--reduce_dtype={reduce_dtype} beside --every_k={every_k}: a window's mean is the "
            f"optimizer's, which a hook replaces; write --comm_hook={hook}."
        )
