"""What absl_apps.train says of its run, and what its run.json holds."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping
from typing import Any

import jax
from absl import flags

from absl_apps import comm_hooks, environment, train_program, transformer
from absl_apps.train_start import Start
from absl_apps.train_state import TrainState
from gradaccum import aot, audit


@dataclasses.dataclass(frozen=True)
class Built:
    """A step that is compiled.

    Attributes:
      program: what it computes.
      microbatches: of a call on each device.
      plan: how they were found, if they were not given.
      step: (state, batch, call) -> (state, measured).
      report: what it communicates.
    """

    program: train_program.Program
    microbatches: int
    plan: aot.Plan | None
    step: Any
    report: audit.Report


def state_bytes(state: TrainState) -> int:
    """Return the bytes of parameters and optimizer that each device holds, from shapes."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )


def unit(start: Start) -> str:
    """Return what a token of the data is."""
    return "byte" if start.data.corpus.dtype.itemsize == 1 else "token"


def described(start: Start, state: TrainState, microbatches: int) -> str:
    """Return the lines that are printed before anything is compiled."""
    corpus, data = start.data.corpus, start.data
    chosen, mesh, processes = start.chosen, start.mesh, jax.process_count()
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


def run_json(start: Start, built: Built, step: int) -> dict[str, Any]:
    """Return what run.json holds from before the first step on.

    Args:
      start, built: of the run.
      step: the first that is to be taken now.
    """
    state, plan, report = built.program.state, built.plan, built.report
    corpus = start.data.corpus
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = environment.environment(start.mesh)
    facts["versions"] |= environment.distributions("grain", "orbax-checkpoint", "tensorboardX")
    earlier = (start.outputs.earlier or {}).get("starts", [])
    return {
        "flags": dict(start.chosen),
        **facts,
        "starts": [*earlier, {"step": step, "time": now, "commit": facts.get("commit")}],
        "mesh": dict(start.mesh.shape),
        "processes": jax.process_count(),
        "microbatches": built.microbatches,
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


def stopped(
    signal: str,
    calls: int,
    FLAGS: flags.FlagValues,  # noqa: N803
    saved: bool,
) -> str:
    """Return the line of a run that a signal has stopped after some calls."""
    step, rest = divmod(calls, FLAGS.every_k)
    at = f"step {step}" + (f", call {rest} of {FLAGS.every_k}" if rest else "")
    kept = "saved: the same command goes on" if saved else "nothing is saved (--keep=0)"
    return f"train: {signal} at {at} of {FLAGS.steps}; {kept}."


def ended(start: Start, run: Mapping[str, Any], measured: Mapping[str, float], recent: int) -> str:
    """Return the lines at the end of a run.

    Args:
      start: of the run.
      run: what run.json holds.
      measured: by the hook.
      recent: steps that the final loss is the mean of.
    """
    of, given = unit(start), run["flags"]
    left = ["metrics.jsonl", "run.json", "loss.png", "tensorboard/"]
    left += ["checkpoints/"] if given["keep"] else []
    skipped = f"skipped: {run['skipped']} steps that were not finite\n" if run["skipped"] else ""
    return (
        f"final loss: {run['final_loss']:.3f} nats a {of}, the mean of the last {recent} of "
        f"{given['steps']} steps\n"
        f"{of}-unigram entropy: {run['data']['unigram_entropy']:.3f} nats a {of}\n"
        f"{skipped}{comm_hooks.told(measured)}"
        f"this start took {run['seconds']:.0f} s; in {start.outputs.workdir}: {' '.join(left)}"
    )
