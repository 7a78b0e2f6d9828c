"""Train a language model with one cross-device mean a step, for minutes or for weeks.

    pip install -e '.[apps]'
    python -m absl_apps.train

Trains a decoder-only transformer of 0.85 million parameters on the bytes of the Python standard
library for 150 steps, data-parallel over all devices: accelerators where there are any, else
8 simulated CPU devices. First it prints what its compiled step communicates and checks that this
is one mean of the gradients. Expected: a final loss near 2.1 nats a byte, where a model of byte
frequencies alone cannot pass 3.15.

Go on after a stop:  the same command, with a --workdir. What was killed at any point continues from
                   its last checkpoint, and ends with the losses that it would have had, to the last
                   bit, on the same mesh. SIGTERM and ctrl-C save first. Another mesh, or other
                   numbers of microbatches, may be given; what would make it another run is
                   refused.
Text of your own:  python -m absl_apps.train --data='books/*.txt' --workdir=runs/books
GPT-2's tokens:    python -m absl_apps.train --data=train.bin --eval_data=val.bin \\
                       --vocab_size=50257 --document_end=50256 --workdir=runs/tokens
Sharded state:     python -m absl_apps.train --mesh=replica=2,fsdp=4
Tensor parallel:   python -m absl_apps.train --mesh=dp=4,mp=2 --sequence_parallel
Gradients in int8: python -m absl_apps.train --comm_hook=int8_quantize:error_feedback=True
Several hosts, one command on each, with a --workdir that they share; where the cluster does not say
which of them this is, as a TPU pod does, --coordinator_address=HOST:PORT --num_processes=N
--process_id=I do:
                   python -m absl_apps.train --multihost --workdir=/shared/run

In --workdir: metrics.jsonl, a line a step; the same in tensorboard/; checkpoints/; run.json, what
was run, with the audit; and at the end loss.png.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import app, flags

from absl_apps import (
    cluster,
    comm_hooks,
    meshes,
    microbatch_flags,
    stopping,
    train_batches,
    train_checks,
    train_flags,
    train_program,
    train_report,
    train_resume,
    train_start,
)
from absl_apps.checkpoints import Checkpoints
from absl_apps.train_loop import Loop, Progress
from absl_apps.train_profile import Profile
from absl_apps.train_state import TrainState, init_state
from gradaccum import audit


def train(FLAGS: flags.FlagValues) -> dict[str, Any]:  # noqa: N803
    """Run the whole program; return what run.json holds at its end."""
    with stopping.Signals() as signals, contextlib.ExitStack() as stack:
        began = time.monotonic()
        with errors_in_one_line():  # what the user can get wrong, before anything is computed
            start = train_start.start(FLAGS)
        outputs = stack.enter_context(start.outputs)
        say = functools.partial(print, flush=True) if outputs.writes else lambda _: None
        with errors_in_one_line():
            checkpoints, saved = train_resume.open_checkpoints(start, FLAGS.keep)
        if checkpoints:
            stack.enter_context(checkpoints)
        progress = Progress(**saved["progress"]) if saved else Progress()
        if saved and saved["finished"]:
            say(f"train: {outputs.where}: all {FLAGS.steps} steps are taken already.")
            return outputs.earlier or {}

        built = build(start, say)
        state = first_state(built.program, FLAGS.seed, checkpoints, saved)
        step = progress.calls // FLAGS.every_k
        if saved:
            say(f"goes on from the checkpoint of step {step}\n")
        with errors_in_one_line():
            run = train_report.run_json(start, built, step)
            if outputs.earlier is None:
                outputs.describe(run)  # first: a directory without it is taken for another's
            outputs.resume(saved["metrics_bytes"] if saved else 0)
            outputs.describe(run)
        cluster.exchange("ready")  # the slowest compiler may take longer than a collective waits

        signals.heeded()
        loop = loop_of(FLAGS, start, built, checkpoints, saved, signals)
        with errors_of_the_disk():
            progress, measured, stopped = loop.run(state, progress)
        if stopped:
            say(train_report.stopped(stopped, progress.calls, FLAGS, bool(checkpoints)))
            sys.exit(stopping.exit_code(stopped))

        with errors_in_one_line():
            final_loss = float(np.mean(progress.recent)) if progress.recent else math.nan
            run |= {"final_loss": final_loss, **measured}
            run |= {"skipped": progress.skipped, "seconds": time.monotonic() - began}
            outputs.chart(run["data"]["unigram_entropy"])
            outputs.describe(run)
        profiled = loop.profile.told() if loop.profile else ""
        say(train_report.ended(start, run, measured, len(progress.recent)) + profiled)
        return run


############################################# Parts ##############################################


def build(start: train_start.Start, say: Callable[[str], None]) -> train_report.Built:
    """Compile the step, print what it communicates, and check that this is one mean."""
    chosen, plan = start.chosen, None
    microbatches = chosen["microbatches"]
    if microbatches == microbatch_flags.AUTO:
        with errors_in_one_line():
            plan = train_program.plan(chosen, start.mesh, start.memory_limit)
        # Processes may be allowed a little more or less; all take what fits on each.
        microbatches = max(map(int, cluster.exchange(str(plan.microbatches))))
        say(f"--microbatches=auto: {microbatches}, of what was compiled:\n{plan}\n")
    with errors_in_one_line():  # what the hook refuses
        program = train_program.describe(chosen, start.mesh)
    say(train_report.described(start, program.state, microbatches))

    lowered = program.step(microbatches).lower(*program.args)
    with errors_in_one_line():
        cluster.agree_on_program(lowered)
    step = lowered.compile()
    report = audit.collectives(step, mesh=start.mesh)
    setup = program.setup
    say(f"\nwhat one {'call' if setup.every_k > 1 else 'step'} communicates:\n{report}")
    branch = setup.every_k > 1 or comm_hooks.in_branch(setup.comm_hook)
    for axes in comm_hooks.audited_axes(setup.comm_hook, setup.data_axes):
        audit.assert_one_reduction(step, axis_name=axes, mesh=start.mesh, conditional=branch)
    one = f"one device along {start.along}: no mean"
    say((one if start.devices == 1 else "one cross-device mean: checked") + "\n")
    return train_report.Built(program, microbatches, plan, step, report)


def first_state(
    program: train_program.Program,
    seed: int,
    checkpoints: Checkpoints | None,
    saved: Mapping[str, Any] | None,
) -> TrainState:
    """Return the state that was saved last, or a new one, on the devices."""
    with errors_in_one_line():
        if saved and checkpoints:
            return train_resume.restored(program, checkpoints, saved)
        where = jax.tree.map(lambda x: x.sharding, program.state)
        init = functools.partial(init_state, setup=program.setup)
        return jax.jit(init, out_shardings=where)(jax.random.key(seed))


def loop_of(
    FLAGS: flags.FlagValues,  # noqa: N803
    start: train_start.Start,
    built: train_report.Built,
    checkpoints: Checkpoints | None,
    saved: Mapping[str, Any] | None,
    signals: stopping.Signals,
) -> Loop:
    """Return the loop over what was built."""
    program, outputs = built.program, start.outputs
    evaluate, profile = None, None
    if start.data.held_out is not None and FLAGS.eval_every:
        evaluate = train_batches.evaluation(
            program, built.microbatches, start, FLAGS.eval_sequences
        )
    if FLAGS.profile_steps:
        steps = train_checks.parse_steps(FLAGS.profile_steps)
        profile = Profile(outputs.profile_path, steps, start.hosts)
    schedule = train_program.schedule(start.chosen)
    return Loop(
        step=built.step,
        batches=functools.partial(train_batches.training, program, start, FLAGS.seed),
        evaluate=evaluate,
        steps=FLAGS.steps,
        every_k=FLAGS.every_k,
        eval_every=FLAGS.eval_every,
        checkpoint_every=FLAGS.checkpoint_every,
        skips=FLAGS.on_nonfinite == "skip",
        rates=np.asarray(jax.vmap(schedule)(np.arange(FLAGS.steps))),
        tokens=FLAGS.global_batch * FLAGS.seq_len,
        outputs=outputs,
        checkpoints=checkpoints,
        signals=signals,
        profile=profile,
        facts={"mesh": dict(start.mesh.shape)},
        saved=saved["progress"]["calls"] if saved else None,
    )


############################################# Errors #############################################


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Exit with the message, not a traceback, where the mistake is the user's: all processes do."""
    try:
        with cluster.failing_together():
            yield
    except ValueError as error:
        sys.exit(f"train: {error}")


@contextlib.contextmanager
def errors_of_the_disk() -> Iterator[None]:
    """Exit with the message of what could not be written, in this process alone.

    Others may be in the middle of a step, and end with it.
    """
    try:
        yield
    except ValueError as error:
        sys.exit(f"train: {error}")


def main(argv: list[str]) -> None:
    del argv  # train_flags.parse has refused all but flags
    FLAGS = flags.FLAGS
    meshes.prepare_platform(FLAGS.cpu_devices)
    try:
        if not FLAGS.multihost:
            meshes.first_query()
            train(FLAGS)
            return
        with cluster.ending_together():
            cluster.join("train", FLAGS, notices=True)  # makes the first device query
            train(FLAGS)
    except KeyboardInterrupt:  # before the run hears signals itself
        sys.exit(stopping.exit_code("SIGINT"))


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: train_flags.parse(argv, flags.FLAGS, __doc__))
