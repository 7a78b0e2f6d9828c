"""The steps of absl_apps.train: batches ahead of them, a line of metrics after each, a profile."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import tqdm

from absl_apps import cluster, comm_hooks, run_files
from absl_apps.train_state import TrainState


def run_steps(
    step_fn: Callable[..., Any],
    state: TrainState,
    load_batch: Callable[[int], jax.Array],
    steps: int,
    tokens_a_step: int,
    outputs: run_files.RunFiles,
    profile: Profile | None = None,
) -> tuple[list[float], dict[str, float]]:
    """Take the steps and log each; return all losses, and what the hook measured at last.

    Exits at a loss that is not finite. Every process of a run takes every step, and profiles the
    same ones.

    Args:
      step_fn: (state, tokens) -> (state, loss).
      state: the first.
      load_batch: step -> tokens.
      steps: to take.
      tokens_a_step: of all devices.
      outputs: where the metrics and the profile go.
      profile: which steps to profile.
    """
    losses: list[float] = []
    measured: dict[str, float] = {}
    tokens = load_batch(0)
    finished = time.monotonic()
    # disable=None: the bar shows on a terminal only.
    bar = tqdm.tqdm(range(steps), unit="step", disable=None if outputs.writes else True)
    with contextlib.ExitStack() as trace:  # a run that ends early writes it too
        for step in bar:
            if profile and step == profile.steps.start:
                trace.enter_context(profile.trace())
                finished = time.monotonic()  # no step's time
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, loss = step_fn(state, tokens)
                # The devices work by themselves now: prepare the next batch, then ask for the loss.
                if step + 1 < steps:
                    tokens = load_batch(step + 1)
                losses.append(float(loss))
            started, finished = finished, time.monotonic()
            if not math.isfinite(losses[-1]):
                trace.close()
                cluster.exchange("stopped")  # no process ends while another writes its profile
                sys.exit(
                    f"train: the loss is {losses[-1]} at step {step}; lower --learning_rate. "
                    f"The steps before it are in {outputs.metrics_path}."
                )
            rate = tokens_a_step / (finished - started)
            measured = comm_hooks.measured(state.opt_state)
            outputs.log(step=step, loss=losses[-1], **measured, tokens_per_second=rate)
            shown = {"loss": f"{losses[-1]:.3f}"} | {k: f"{x:.1f}" for k, x in measured.items()}
            bar.set_postfix(shown, tokens_per_second=f"{rate:,.0f}")
            if profile and step + 1 == profile.steps.stop:
                trace.close()
                finished = time.monotonic()
    return losses, measured


@dataclasses.dataclass(frozen=True)
class Profile:
    """Which steps to profile, and where to.

    Each process writes `<directory>/plugins/profile/<session>/<host>.xplane.pb`: one session of
    all hosts, which XProf shows together, if they share the directory. Processes of one host
    would write one file: there each has a session of its own.
    """

    directory: str
    steps: range
    hosts: Sequence[str]  # by process

    @property
    def session(self) -> str:
        name = f"steps_{self.steps.start}_{self.steps.stop}"
        alone = len(set(self.hosts)) == len(self.hosts)
        return name if alone else f"{name}_process_{jax.process_index()}"

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        options = jax.profiler.ProfileOptions()
        options.session_id = self.session
        jax.profiler.start_trace(self.directory, profiler_options=options)
        try:
            yield
        finally:
            jax.profiler.stop_trace()

    def told(self) -> str:
        """Return lines for the end of a run: where the profile is, and what shows it."""
        where = ", on each host" if len(set(self.hosts)) > 1 else ""
        return (
            f"\nprofile of steps {self.steps.start} to {self.steps.stop - 1}: {self.directory}"
            f"{where}; to see it: pip install xprof && xprof --logdir={shlex.quote(self.directory)}"
        )
