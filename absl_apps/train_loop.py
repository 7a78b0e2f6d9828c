"""The calls of absl_apps.train: a line of metrics a step, evaluations, checkpoints; how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from absl_apps import charts, cluster, comm_hooks, run_files, stopping
from absl_apps.checkpoints import Checkpoints
from absl_apps.train_profile import Profile
from absl_apps.train_state import TrainState

if TYPE_CHECKING:
    import tqdm

MEASURED = "loss", "gradient_norm"
MOST_SKIPPED = 10  # in a row: from there on nothing would change


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is: what a checkpoint holds beside the state.

    Attributes:
      calls: of the compiled step, all of them.
      skipped: steps whose loss or gradient was not finite.
      in_a_row: skipped steps since the last good one.
      recent: losses of the last steps that were not skipped.
    """

    calls: int = 0
    skipped: int = 0
    in_a_row: int = 0
    recent: Sequence[float] = ()

    def after(self, loss: float, good: bool) -> Progress:
        if not good:
            return Progress(self.calls, self.skipped + 1, self.in_a_row + 1, self.recent)
        return Progress(self.calls, self.skipped, 0, [*self.recent, loss][-charts.FINAL_STEPS :])


@dataclasses.dataclass
class Loop:
    """The calls of a run.

    Attributes:
      step: (state, batch, call) -> (state, measured).
      batches: call -> the batches from there on, on the devices.
      evaluate: parameters -> the loss of held-out data; None: there are none.
      steps, every_k: of the run; calls of a step.
      eval_every, checkpoint_every: steps; 0: never.
      skips: whether a step that is not finite is left out, and does not stop the run.
      rates: the learning rate of each step.
      tokens: of a step, on all devices.
      outputs, checkpoints, signals, profile: of the run; no checkpoints, no profile: None.
      facts: what each checkpoint is to say beside the progress.
      saved: the calls of the newest checkpoint.
    """

    step: Callable[..., Any]
    batches: Callable[[int], Generator[Any, None, None]]
    evaluate: Callable[[Any], float] | None
    steps: int
    every_k: int
    eval_every: int
    checkpoint_every: int
    skips: bool
    rates: np.ndarray
    tokens: int
    outputs: run_files.RunFiles
    checkpoints: Checkpoints | None
    signals: stopping.Signals
    profile: Profile | None
    facts: dict[str, Any]
    saved: int | None

    def run(
        self, state: TrainState, progress: Progress
    ) -> tuple[Progress, dict[str, float], str | None]:
        """Take the calls that are left.

        Every process of a run takes every call, evaluates, saves and profiles at the same ones.

        Returns:
          How far it came, what the hook measured last, and the signal that has stopped
          the run, None at its end. All is saved then.

        Raises:
          ValueError: what is written cannot be.
          SystemExit: at a loss or gradient that is not finite, by `skips`.
        """
        calls, stopped = self.steps * self.every_k, None
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(self._bar(progress))
            batches = stack.enter_context(contextlib.closing(self.batches(progress.calls)))
            if self.profile:
                stack.callback(self.profile.stop)  # a run that ends early writes it too
            batch, started = next(batches), time.monotonic()
            for call in range(progress.calls, calls):
                step, part = divmod(call, self.every_k)
                ends = part + 1 == self.every_k
                if self.profile and part == 0 and step == self.profile.steps.start:
                    self.profile.start()
                    started = time.monotonic()  # no step's time
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    state, measured = self.step(state, batch, np.int32(call))
                    # The devices work by themselves now: place the next batch, then ask.
                    batch = next(batches) if call + 1 < calls else None
                    if ends:
                        measured = {name: float(measured[name]) for name in MEASURED}
                progress = dataclasses.replace(progress, calls=call + 1)
                if ends:
                    seconds = time.monotonic() - started
                    if self.profile and step + 1 == self.profile.steps.stop:
                        self.profile.stop()
                    progress = self._finish(step, measured, seconds, state, progress, bar)
                    started = time.monotonic()
                stopped = self.signals.asked(call + 1) if call + 1 < calls else None
                if stopped:
                    self.save(state, progress)
                    break
        return progress, comm_hooks.measured(state), stopped

    def _bar(self, progress: Progress) -> tqdm.tqdm[Any]:
        import tqdm

        return tqdm.tqdm(
            total=self.steps,
            initial=progress.calls // self.every_k,
            unit="step",
            disable=None if self.outputs.writes else True,  # None: unless it is on a terminal
        )

    def _finish(
        self,
        step: int,
        measured: dict[str, float],
        seconds: float,
        state: TrainState,
        progress: Progress,
        bar: tqdm.tqdm[Any],
    ) -> Progress:
        """Logs a step, evaluates after it and saves it, where that is due."""
        bad = [name for name, x in measured.items() if not math.isfinite(x)]
        why = f"its {bad[0].replace('_', ' ')} is {measured[bad[0]]}" if bad else ""
        if bad and not self.skips:
            self._stop(step, why, state, progress)
        metrics: dict[str, Any] = {
            **measured,
            "learning_rate": float(self.rates[step - progress.skipped]),
            **comm_hooks.measured(state),
            "tokens_per_second": self.tokens / seconds,
        }
        progress = progress.after(measured["loss"], not bad)
        last = step + 1 == self.steps
        if self.evaluate and (last or (step + 1) % self.eval_every == 0):
            metrics["eval_loss"] = self.evaluate(state.params)
        if bad:
            metrics["skipped"] = True
            self._say(bar, f"train: step {step} is skipped: {why}.")
        self.outputs.log(step=step, **metrics)
        shown = {name: f"{x:.3f}" for name, x in metrics.items() if name.endswith("loss")}
        bar.set_postfix(shown, tokens_per_second=f"{metrics['tokens_per_second']:,.0f}")
        bar.update()
        if bad and progress.in_a_row % MOST_SKIPPED == 0:  # started again, a run may try as many
            self.save(state, progress)
            self._exit(
                f"steps {step + 1 - MOST_SKIPPED} to {step} are not finite, {MOST_SKIPPED} in a "
                f"row (of the last, {why}); lower --learning_rate, in a --workdir of its own."
            )
        if last or (self.checkpoint_every and (step + 1) % self.checkpoint_every == 0):
            self.save(state, progress, wait=last)
        return progress

    def _stop(self, step: int, why: str, state: TrainState, progress: Progress) -> None:
        """Ends the run at a step that is not finite, with the state before it saved."""
        self.save(state, dataclasses.replace(progress, calls=step * self.every_k))
        kept = " The state before it is saved: --on_nonfinite=skip goes on from there, without it."
        self._exit(
            f"step {step} is not finite: {why}; lower --learning_rate, in a --workdir of its "
            f"own.{kept if self.checkpoints else ''}"
        )

    def save(self, state: TrainState, progress: Progress, wait: bool = True) -> None:
        """Save the state, unless the newest checkpoint is of this call."""
        if self.checkpoints is None:
            return
        if self.saved != progress.calls:
            facts = {**self.facts, "progress": dataclasses.asdict(progress)}
            facts["metrics_bytes"] = self.outputs.settle()
            self.checkpoints.save(progress.calls, state, facts)
            self.saved = progress.calls
        if wait:
            self.checkpoints.wait()

    def _say(self, bar: tqdm.tqdm[Any], text: str) -> None:
        if self.outputs.writes:
            bar.write(text, file=sys.stderr)

    def _exit(self, text: str) -> None:
        if self.profile:
            self.profile.stop()
        cluster.exchange("stopped")  # no process ends while another writes its profile
        sys.exit(f"train: {text}")
