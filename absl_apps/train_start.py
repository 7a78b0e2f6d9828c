"""What a user of absl_apps.train can get wrong, looked at before anything is computed."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from absl_apps import (
    batches,
    cluster,
    comm_hooks,
    corpus,
    environment,
    flag_parsing,
    meshes,
    microbatch_flags,
    run_files,
    train_checks,
    train_flags,
    train_program,
)


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
      corpus: of --data.
      train, held_out: its sequences, or --eval_data's; None: nothing is held out.
      fingerprint: tells them from other data.
    """

    corpus: corpus.Corpus
    train: batches.Sequences
    held_out: batches.Sequences | None
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run begins with.

    Attributes:
      chosen: the flags, by name.
      mesh: the devices.
      devices: along the data axes.
      memory_limit: bytes of a device for --microbatches=auto; None: the device's own.
      data: what to train on.
      outputs: the files of the run.
      hosts: names of the hosts, by process.
    """

    chosen: Mapping[str, Any]
    mesh: jax.sharding.Mesh
    devices: int
    memory_limit: int | None
    data: Data
    outputs: run_files.RunFiles
    hosts: Sequence[str]

    @property
    def along(self) -> str:
        return " and ".join(meshes.data_axes(self.mesh))


def start(FLAGS: flags.FlagValues) -> Start:  # noqa: N803
    """Look at flags, devices, data and the working directory, and take the directory.

    Raises:
      ValueError: in all processes, with the first of the mistakes.
    """
    with cluster.failing_together():
        _check_installed()
        chosen = flag_parsing.chosen(FLAGS, train_flags.GROUPS)
        config = train_program.model(chosen)
        asked = FLAGS.mesh or f"{meshes.DATA_AXIS}={jax.device_count()}"
        axes = meshes.parse(asked)
        train_checks.check_model_axis(axes, config, FLAGS.seq_len, FLAGS.sequence_parallel)
        mesh = meshes.make(axes, f"--mesh={asked}", simulate="--cpu_devices")
        data_axes = meshes.data_axes(mesh)
        devices = math.prod(mesh.shape[axis] for axis in data_axes)
        planned = FLAGS.microbatches == microbatch_flags.AUTO
        k = 1 if planned else FLAGS.microbatches
        train_checks.check_batch(FLAGS.global_batch, FLAGS.every_k, k, devices)
        limit = microbatch_flags.memory_limit(FLAGS.hbm_gb)
        if planned:
            train_program.check_limit(mesh, limit)
        hook = comm_hooks.parse(FLAGS.comm_hook) if FLAGS.comm_hook else None
        comm_hooks.check_axes(hook, data_axes)
        comm_hooks.check_devices(hook, devices)
        data = _data(FLAGS)
        if data.held_out is not None and FLAGS.eval_every:
            _check_evaluated(data.held_out, FLAGS.eval_sequences)
    with cluster.failing_together():
        outputs, hosts = _agreed(FLAGS, mesh, data)
    with cluster.failing_together():
        if outputs.writes and outputs.earlier is not None:
            outputs.check_same(chosen, train_flags.RESUMABLE)
            _check_same_data(outputs, data)
        if not outputs.writes and FLAGS.keep and not os.path.isdir(outputs.workdir):
            raise ValueError(
                f"{outputs.where}: is not where process 0 has it; give all processes one "
                "directory that they share, or --keep=0 for a run without checkpoints."
            )
    return Start(chosen, mesh, devices, limit, data, outputs, hosts)


def _check_installed() -> None:
    """Raises ValueError where a library is missing, which a run may need after a week only."""
    for library in ("grain", "matplotlib", "orbax", "tensorboardX", "tqdm"):
        if importlib.util.find_spec(library) is None:
            raise ValueError(f"{library} is not installed; pip install 'gradaccum[apps]'.")


def _data(FLAGS: flags.FlagValues) -> Data:  # noqa: N803
    def opened(flag: str, patterns: Sequence[str]) -> corpus.Corpus:
        parts = [part for text in patterns for part in text.split(",") if part]
        return corpus.open_corpus(
            corpus.find_files(parts, f"--{flag}"),
            flag=f"--{flag}",
            max_bytes=FLAGS.max_data_bytes,
            vocab_size=FLAGS.vocab_size,
            document_end=FLAGS.document_end,
        )

    default = [corpus.default_pattern()] if FLAGS.data is None else FLAGS.data
    data = opened("data", default)
    if FLAGS.eval_data is None:
        train, held_out = batches.split(data, FLAGS.seq_len, FLAGS.eval_fraction)
        return Data(data, train, held_out, data.fingerprint())
    other = opened("eval_data", FLAGS.eval_data)
    train, _ = batches.split(data, FLAGS.seq_len, 0)
    held_out = batches.Sequences(other, FLAGS.seq_len)
    if not any(sequence["mask"].any() for sequence in held_out):
        raise ValueError(
            f"--eval_data: its {other.size:,} tokens are all the first of a document, which "
            "nothing predicts; give longer documents."
        )
    return Data(data, train, held_out, f"{data.fingerprint()} {other.fingerprint()}")


def _check_evaluated(held_out: batches.Sequences, most: int) -> None:
    """Raise ValueError where the sequences of an evaluation have no target: it has no mean."""
    chosen = batches.evaluation(held_out, 1, np.arange(1), most)
    if not any(chosen[i]["mask"].any() for i in range(len(chosen))):
        raise ValueError(
            f"--eval_sequences={most}: of the {len(held_out):,} sequences held out these have no "
            "target, as all their tokens begin documents; take more."
        )


def _agreed(
    FLAGS: flags.FlagValues,  # noqa: N803
    mesh: jax.sharding.Mesh,
    data: Data,
) -> tuple[run_files.RunFiles, list[str]]:
    """Returns the run's files and hosts, once all processes are alike.

    What differs between processes would have them wait for each other for ever.
    """
    facts = train_flags.agreed(FLAGS) | environment.versions()
    del facts["python"]  # its patches do no harm
    facts["num_processes"] = FLAGS.num_processes or jax.process_count()
    facts["data"] = f"{data.corpus.size:,} tokens, fingerprint {data.fingerprint}"
    workdir = FLAGS.workdir or os.path.join("runs", time.strftime("%Y%m%d-%H%M%S"))
    told = cluster.agree(facts | {"_workdir": workdir, "_host": platform.node()})
    outputs = run_files.RunFiles(str(told[0]["_workdir"]), writes=jax.process_index() == 0)
    return outputs, [str(x["_host"]) for x in told]


def _check_same_data(outputs: run_files.RunFiles, data: Data) -> None:
    """Raise ValueError where a run is to go on with other data than it has begun with."""
    there = (outputs.earlier or {}).get("data", {}).get("fingerprint")
    if there != data.fingerprint:
        raise ValueError(
            f"--data or --eval_data: not what the run in {outputs.where} has (fingerprint {there} "
            f"there, {data.fingerprint} here); give it as it was, or a --workdir of its own."
        )
