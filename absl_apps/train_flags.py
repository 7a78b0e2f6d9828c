"""The flags of absl_apps.train: their groups, units and defaults.

They are defined by a call, not by an import: another program that imports this one, or has a
flag of the same name, is not disturbed. What cannot be combined is in train_checks.
"""

from __future__ import annotations

import functools
from typing import Any

from absl import flags

from absl_apps import (
    cluster,
    comm_hooks,
    flag_parsing,
    microbatch_flags,
    optimizer_flags,
    train_checks,
    transformer,
)
from absl_apps.meshes import DATA_AXIS, FSDP_AXIS, MODEL_AXIS, REPLICA_AXIS

# The order of --help; a test keeps it complete.
GROUPS = {
    "Data": ("data", "vocab_size", "document_end", "max_data_bytes", "seed"),
    "Held-out data": ("eval_data", "eval_fraction", "eval_every", "eval_sequences"),
    "Model": ("d_model", "n_layer", "n_head", "seq_len", "dropout", "compute_dtype", "remat"),
    "Steps": ("steps", "global_batch", "every_k", "microbatches", "hbm_gb", "on_nonfinite"),
    "Optimizer": optimizer_flags.FLAGS,
    "Devices and communication": (
        "mesh",
        "zero",
        "sequence_parallel",
        "comm_hook",
        "reduce_dtype",
        "cpu_devices",
    ),
    "Processes": cluster.FLAGS,
    "Output": ("workdir", "checkpoint_every", "keep", "profile_steps"),
}

# What the processes of one run may differ in: where things are, and how they found each other.
OWN = {"data", "eval_data", "workdir", "cpu_devices", *cluster.FLAGS}

# What a run may be resumed with: other devices, other outputs. Its data may have moved, but is
# looked at; with another --every_k the state has another form.
RESUMABLE = OWN | {
    *("eval_every", "eval_sequences", "remat", "microbatches", "hbm_gb", "on_nonfinite"),
    *("mesh", "zero", "sequence_parallel", "reduce_dtype"),
    *("checkpoint_every", "keep", "profile_steps"),
}


def define(values: flags.FlagValues) -> None:
    """Define every flag of the program, and the checks that need flags alone, on `values`."""
    _define_data(values)
    _define_model(values)
    _define_steps(values)
    optimizer_flags.define(values)
    _define_devices(values)
    cluster.define(values)
    _define_output(values)
    train_checks.register(values)


def _integer(
    values: flags.FlagValues, name: str, default: int | None, text: str, lower_bound: int = 1
) -> None:
    flags.DEFINE_integer(name, default, text, lower_bound=lower_bound, flag_values=values)


def _define_data(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string(
        "data",
        None,
        "Files or globs (** descends), separated by commas or given again: text, whose tokens are "
        "its bytes, or token files (.bin) of uint16, as nanoGPT writes them. Each file begins a "
        "document. Default: the Python standard library's own *.py files.",
        flag_values=values,
    )
    _integer(values, "vocab_size", None, "Tokens in the vocabulary of token files; text has 256.")
    _integer(
        values,
        "document_end",
        None,
        "The token that ends a document in token files, as 50256 of GPT-2. What follows it begins "
        "another, and is not predicted. Default: only files end documents.",
        0,
    )
    _integer(
        values,
        "max_data_bytes",
        None,
        "Bytes to use at most of --data, and of --eval_data, each from its start. Default: all.",
    )
    flags.DEFINE_integer(
        "seed",
        0,
        "Seed of parameters, dropout and the order of the data.",
        lower_bound=0,
        upper_bound=2**32 - 1,
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "eval_data",
        None,
        "Files or globs to hold out, as --data. Default: --eval_fraction of --data.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "eval_fraction",
        0.05,
        "Part of the sequences of --data, the last, to hold out; 0: none.",
        flag_values=values,
    )
    _integer(
        values,
        "eval_every",
        50,
        "Steps between losses of held-out data, beside that after the last step; 0: none at all.",
        0,
    )
    _integer(
        values,
        "eval_sequences",
        512,
        "Held-out sequences of each such loss at most, spread evenly over them.",
    )


def _define_model(values: flags.FlagValues) -> None:
    _integer(values, "d_model", 128, "Width of the residual stream.")
    _integer(values, "n_layer", 4, "Layers.")
    _integer(values, "n_head", 4, "Attention heads; 2 * n_head divides d_model.")
    _integer(values, "seq_len", 128, "Tokens predicted per sequence.")
    flags.DEFINE_float(
        "dropout",
        0.0,
        "Probability of dropping an element of what attention and MLP add to the residual stream, "
        "in training.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "compute_dtype",
        "bfloat16",
        ["bfloat16", "float32"],
        "Dtype inside the layers; parameters, gradients and the loss are float32.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "remat",
        transformer.REMAT[0],
        transformer.REMAT,
        "What the backward pass computes again instead of keeping it: all of a layer, all but its "
        "matrix products (dots), or nothing (none). Least memory first.",
        flag_values=values,
    )


def _define_steps(values: flags.FlagValues) -> None:
    _integer(values, "steps", 150, "Optimizer steps. All other counts of steps are of these too.")
    _integer(values, "global_batch", 64, "Sequences per step, over all devices and microbatches.")
    _integer(
        values,
        "every_k",
        1,
        "Calls of the compiled program per step, a window of gradaccum.MultiSteps, each with its "
        "part of the batch. One call with microbatches is faster; calls fit where one batch does "
        "not fit on the host.",
    )
    microbatch_flags.define(values, 4)
    flags.DEFINE_enum(
        "on_nonfinite",
        "stop",
        ["skip", "stop"],
        "At a loss or gradient that is inf or NaN: leave out the step, with parameters and "
        "optimizer as they were, or stop with a checkpoint of them. Ten in a row stop the run.",
        flag_values=values,
    )


def _define_devices(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "mesh",
        None,
        f"Devices along the data axis, as {DATA_AXIS}=8, or {FSDP_AXIS}=8 for one that parameters "
        f"are split over; or along two, as {REPLICA_AXIS}=2,{DATA_AXIS}=4 or {REPLICA_AXIS}=2,"
        f"{FSDP_AXIS}=4; and last, along the model axis, over which heads, hidden features and "
        f"vocabulary are sharded, as {DATA_AXIS}=4,{MODEL_AXIS}=2. Default: {DATA_AXIS}, all there "
        "are.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "zero",
        None,
        "ZeRO stage, what is split over the last data axis: 0 nothing, 1 the optimizer's state, 2 "
        "gradients too, 3 parameters too, gathered once a call (FSDP). Of two data axes the outer "
        f"holds copies (HSDP). Beside {MODEL_AXIS} it splits each device's shard of the model. "
        f"Default: 3 along {FSDP_AXIS}, else 0.",
        lower_bound=0,
        upper_bound=3,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "sequence_parallel",
        False,
        "Whether activations between the layers, which all devices along "
        f"{MODEL_AXIS} otherwise hold whole, are sharded over it along the sequence.",
        flag_values=values,
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
    flags.DEFINE_enum(
        "reduce_dtype",
        None,
        ["bfloat16", "float16"],
        "Dtype of gradients on the wire, in the one mean of a step. Default: float32.",
        flag_values=values,
    )
    _integer(
        values,
        "cpu_devices",
        8,
        "Simulated CPU devices of each process, on a machine without accelerators.",
    )


def _define_output(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "workdir",
        None,
        "Directory of this run: metrics.jsonl, tensorboard/, run.json, checkpoints/, loss.png. A "
        "run that was interrupted goes on when it is started again with the same one; another "
        "run's is refused. Default: a new one, runs/<date>-<time>. Of several processes, all need "
        "it for checkpoints, and process 0 writes the rest.",
        flag_values=values,
    )
    _integer(
        values,
        "checkpoint_every",
        50,
        "Steps between checkpoints, beside those at the end and at SIGTERM; 0: none but these. "
        "Each is named after the calls taken: steps * every_k.",
        0,
    )
    _integer(values, "keep", 3, "Checkpoints to keep, the newest; 0: none is written.", 0)
    flags.DEFINE_string(
        "profile_steps",
        None,
        "Steps to profile, as 10:15 for 10 to 14, counted from 0; into profile/ of --workdir, by "
        "each process on its own host, for XProf.",
        flag_values=values,
    )


def agreed(values: flags.FlagValues) -> dict[str, Any]:
    """Return the flags that all processes of a run must be given alike, by how they are written."""
    chosen = flag_parsing.chosen(values, GROUPS)
    return {f"--{name}": value for name, value in chosen.items() if name not in OWN}


parse = functools.partial(flag_parsing.parse, "train", GROUPS, define)  # (argv, values, manual)
