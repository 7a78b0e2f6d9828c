"""What absl_apps.train says of its run, and what its run.json holds."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping
from typing import Any

import jax

from absl_apps import run_files, transformer
from absl_apps.train_start import Start
from absl_apps.train_state import TrainState
from gradaccum import aot, audit


def state_bytes(state: TrainState) -> int:
    """Return the bytes of parameters and optimizer that each device holds, from shapes."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )


def unit(start: Start) -> str:
    """Return what a token of the data is."""
    return "byte" if start.data.corpus.dtype.itemsize == 1 else "token"


def described(start: Start, state: TrainState, chosen: Mapping[str, Any], microbatches: int) -> str:
    """Return the lines that are printed before anything is compiled."""
    corpus, data = start.data.corpus, start.data
    mesh, processes = start.mesh, jax.process_count()
    of = unit(start)
    held_out = 0 if data.held_out is None else len(data.held_out)
    calls = chosen["every_k"]
    rows = chosen["global_batch"] // (calls * microbatches * start.devices)
    batch = [f"{start.devices} devices along {start.along}", f"{microbatches} microbatches"]
    batch += [f"{calls} calls"] if calls > 1 else []
    batch += [f"{rows} sequences of {chosen['seq_len']} {of}s"]
    return (
        f"data: {corpus.size:,} {of}s of {len(corpus.files)} files; {len(data.train):,} "
        f"sequences to train on, {held_out:,} held out\n"
        f"{of}-unigram entropy: {corpus.unigram_entropy():.3f} nats a {of}\n"
        f"model: {transformer.size(state.params):,} parameters\n"
        f"mesh: {','.join(f'{axis}={n}' for axis, n in mesh.shape.items())}, "
        f"{mesh.devices.flat[0].device_kind}"
        f"{f', {processes} processes' if processes > 1 else ''}\n"
        f"state: {state_bytes(state):,} bytes of parameters and optimizer on each device\n"
        f"batch: {chosen['global_batch']} = {' * '.join(batch)}"
    )


def run_json(
    start: Start,
    state: TrainState,
    chosen: Mapping[str, Any],
    microbatches: int,
    plan: aot.Plan | None,
    report: audit.Report,
    step: int,
) -> dict[str, Any]:
    """Return what run.json holds from before the first step on.

    Args:
      step: the first that is to be taken now.
      start, state, chosen, microbatches, plan, report: of the run.
    """
    corpus = start.data.corpus
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = run_files.environment(start.mesh)
    earlier = (start.outputs.earlier or {}).get("starts", [])
    return {
        "flags": dict(chosen),
        **facts,
        "starts": [*earlier, {"step": step, "time": now, "commit": facts.get("commit")}],
        "mesh": dict(start.mesh.shape),
        "processes": jax.process_count(),
        "microbatches": microbatches,
        "plan": plan and dataclasses.asdict(plan),
        "parameters": transformer.size(state.params),
        "state_bytes": state_bytes(state),  # of each device
        "data": {
            "files": len(corpus.files),
            "tokens": corpus.size,
            "train_sequences": len(start.data.train),
            "eval_sequences": 0 if start.data.held_out is None else len(start.data.held_out),
            "unigram_entropy": corpus.unigram_entropy(),
            "fingerprint": start.data.fingerprint,
        },
        "audit": {
            "totals": {axis: dataclasses.asdict(total) for axis, total in report.totals.items()},
            "collectives": [dataclasses.asdict(row) for row in report],
        },
    }
