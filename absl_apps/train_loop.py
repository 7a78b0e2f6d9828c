"""The calls of absl_apps.train: a line of metrics a step, evaluations, checkpoints; how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tqdm

from absl_apps import cluster, comm_hooks, run_files, stopping
from absl_apps.checkpoints import Checkpoints
from absl_apps.train_profile import Profile
from absl_apps.train_state import TrainState

RECENT = 10  # the final loss is the mean over so many steps: a single step's is noisy
MOST_SKIPPED = 10  # in a row: from there on nothing would change


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is: what a checkpoint holds beside the state.

    Attributes:
      calls: of the compiled step, all of them.
      skipped: steps whose loss or gradient was not finite.
      in_a_row: of these, the last ones.
      recent: losses of the last steps that were not skipped.
    """

    calls: int = 0
    skipped: int = 0
    in_a_row: int = 0
    recent: Sequence[float] = ()

    def after(self, calls: int, loss: float, good: bool) -> Progress:
        if not good:
            return Progress(calls, self.skipped + 1, self.in_a_row + 1, self.recent)
        return Progress(calls, self.skipped, 0, [*self.recent, loss][-RECENT:])


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
    batches: Callable[[int], Iterator[Any]]
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
    ) -> tuple[TrainState, Progress, dict[str, float], str | None]:
        """Take the calls that are left.

        Every process of a run takes every call, evaluates, saves and profiles at the same ones.

        Returns:
          The last state and progress, what the hook measured last, and the signal that has stopped
          the run, None at its end. Then the state is saved.

        Raises:
          ValueError: what is written cannot be.
          SystemExit: at a loss or gradient that is not finite, by `skips`.
        """
        calls = self.steps * self.every_k
        shown = self.outputs.writes
        # disable=None: the bar shows on a terminal only.
        bar = tqdm.tqdm(
            total=self.steps,
            initial=progress.calls // self.every_k,
            unit="step",
            disable=None if shown else True,
        )
        hooked: dict[str, float] = {}
        with contextlib.ExitStack() as stack:  # a run that ends early writes its profile too
            stack.enter_context(contextlib.closing(bar))
            trace = stack.enter_context(contextlib.ExitStack())
            batches = self.batches(progress.calls)
            stack.callback(getattr(batches, "close", lambda: None))
            batch = next(batches)
            started = time.monotonic()
            for call in range(progress.calls, calls):
                step, part = divmod(call, self.every_k)
                if self.profile and part == 0 and step == self.profile.steps.start:
                    trace.enter_context(self.profile.trace())
                    started = time.monotonic()  # no step's time
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    state, measured = self.step(state, batch, np.int32(call))
                    # The devices work by themselves now: place the next batch, then ask.
                    if call + 1 < calls:
                        batch = next(batches)
                    if part + 1 == self.every_k:
                        loss, norm = float(measured["loss"]), float(measured["gradient_norm"])
                progress = dataclasses.replace(progress, calls=call + 1)
                if part + 1 == self.every_k:
                    seconds = time.monotonic() - started
                    if self.profile and step + 1 == self.profile.steps.stop:
                        trace.close()
                    good = math.isfinite(loss) and math.isfinite(norm)
                    if not good and not self.skips:
                        trace.close()
                        self._stop(step, loss, norm, state, progress)
                    rate = float(self.rates[step - progress.skipped])
                    progress = progress.after(call + 1, loss, good)
                    hooked = comm_hooks.measured(state)
                    metrics = {
                        "loss": loss,
                        "gradient_norm": norm,
                        "learning_rate": rate,
                        **hooked,
                        "tokens_per_second": self.tokens / seconds,
                    }
                    self._finish(step, metrics, state, progress, bar)
                    started = time.monotonic()
                stopped = self.signals.asked(call + 1)
                if stopped:
                    trace.close()
                    self.save(state, progress)
                    return state, progress, hooked, stopped
        return state, progress, hooked, None

    def _finish(
        self,
        step: int,
        metrics: dict[str, Any],
        state: TrainState,
        progress: Progress,
        bar: tqdm.tqdm[Any],
    ) -> None:
        """Logs a step, evaluates after it, and saves it, where that is due."""
        last = step + 1 == self.steps
        due = self.eval_every and ((step + 1) % self.eval_every == 0 or last)
        if self.evaluate and due:
            metrics["eval_loss"] = self.evaluate(state.params)
        if progress.in_a_row:
            metrics["skipped"] = True
            why = _what(metrics["loss"], metrics["gradient_norm"])
            self._say(bar, f"train: step {step} is skipped: {why}.")
        self.outputs.log(step=step, **metrics)
        shown = {name: f"{x:.3f}" for name, x in metrics.items() if name.endswith("loss")}
        bar.set_postfix(shown, tokens_per_second=f"{metrics['tokens_per_second']:,.0f}")
        bar.update()
        if progress.in_a_row == MOST_SKIPPED:
            self.save(state, progress)
            self._exit(
                f"train: steps {step + 1 - MOST_SKIPPED} to {step} are not finite, {MOST_SKIPPED} "
                f"in a row (the last: {why}); lower --learning_rate, in a --workdir of its own."
            )
        if last or (self.checkpoint_every and (step + 1) % self.checkpoint_every == 0):
            self.save(state, progress, wait=last)

    def _stop(
        self, step: int, loss: float, norm: float, state: TrainState, progress: Progress
    ) -> None:
        """Ends the run at a step that is not finite, with the state before it saved."""
        self.save(state, dataclasses.replace(progress, calls=step * self.every_k))
        kept = "" if self.checkpoints is None else f" The state before it is kept, step {step}'s:"
        self._exit(
            f"train: {_what(loss, norm)} at step {step}; lower --learning_rate, in a --workdir of "
            f"its own.{kept}" + ("" if not kept else " --on_nonfinite=skip goes on from there.")
        )

    def save(self, state: TrainState, progress: Progress, wait: bool = True) -> None:
        """Save the state, unless it is; after what is written of it already."""
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
        cluster.exchange("stopped")  # no process ends while another writes its profile
        sys.exit(text)


def _what(loss: float, norm: float) -> str:
    return f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
