"""Train a language model with one cross-device mean a step, for minutes or for weeks.

    pip install -e '.[apps]'
    python -m absl_apps.train

Trains a decoder-only transformer of 0.85 million parameters on the bytes of the Python standard
library for 150 steps, data-parallel over all devices: accelerators where there are any, else
8 simulated CPU devices. First it prints what its compiled step communicates and checks that this
is one mean of the gradients. Expected: a final loss near 2.1 nats a byte, where a model of byte
frequencies alone cannot pass 3.15. EXPECTED

Go on after a stop:  the same command, with a --workdir. What was killed at any point continues from
                   its last checkpoint, and ends with the losses that it would have had, to the last
                   bit. SIGTERM and ctrl-C save first. Another mesh, or other numbers of
                   microbatches, may be given; what would make it another run is refused.
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
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import app, flags

from absl_apps import (
    cluster,
    comm_hooks,
    flag_parsing,
    meshes,
    microbatch_flags,
    stopping,
    train_batches,
    train_checks,
    train_flags,
    train_loop,
    train_program,
    train_report,
    train_resume,
    train_start,
)
from absl_apps.train_profile import Profile
from absl_apps.train_state import init_state
from gradaccum import audit


def train(FLAGS: flags.FlagValues) -> dict[str, Any]:  # noqa: N803
    """Run the whole program; return what run.json holds at its end."""
    with stopping.Signals() as signals, contextlib.ExitStack() as stack:
        started = time.monotonic()

        ################# What the user can get wrong, before anything is computed #################

        with errors_in_one_line():
            start = train_start.start(FLAGS)
        outputs, mesh = start.outputs, start.mesh
        stack.callback(outputs.close)
        say = functools.partial(print, flush=True) if outputs.writes else lambda _: None
        chosen = flag_parsing.chosen(FLAGS, train_flags.GROUPS)
        with errors_in_one_line():
            checkpoints, saved = train_resume.open_checkpoints(start, FLAGS.keep)
        if checkpoints:
            stack.callback(checkpoints.close)
        calls = FLAGS.steps * FLAGS.every_k
        if saved and saved["progress"]["calls"] >= calls:
            say(f"train: {outputs.where}: all {FLAGS.steps} steps are taken already.")
            return outputs.earlier or {}

        ######################### The program: its microbatches, and its state #####################

        microbatches, plan = FLAGS.microbatches, None
        if microbatches == microbatch_flags.AUTO:
            with errors_in_one_line():
                plan = train_program.plan(chosen, mesh, start.memory_limit)
            # Processes may be allowed a little more or less; all take what fits on each.
            microbatches = max(map(int, cluster.exchange(str(plan.microbatches))))
            say(f"--microbatches=auto: {microbatches}, of what was compiled:\n{plan}\n")
        with errors_in_one_line():  # what the hook refuses
            program = train_program.describe(chosen, mesh)
        say(train_report.described(start, program.state, chosen, microbatches))

        ##################### One compilation: the step audited is the step run ####################

        step_fn = program.step(microbatches).lower(*program.args)
        with errors_in_one_line():
            cluster.agree_on_program(step_fn)
        step_fn = step_fn.compile()
        report = audit.collectives(step_fn, mesh=mesh)
        say(f"\nwhat one {'call' if FLAGS.every_k > 1 else 'step'} communicates:\n{report}")
        check_audit(program.setup, step_fn)
        checked = "one cross-device mean: checked"
        one = f"one device along {start.along}: no mean"
        say((one if start.devices == 1 else checked) + "\n")

        ############################ The first state, or the last one saved ########################

        progress = train_loop.Progress()
        with errors_in_one_line():
            if saved and checkpoints:
                progress = train_loop.Progress(**saved["progress"])
                state = train_resume.restored(program, checkpoints, saved)
                say(f"goes on from the checkpoint of step {progress.calls // FLAGS.every_k}")
            else:
                where = jax.tree.map(lambda x: x.sharding, program.state)
                init = jax.jit(
                    functools.partial(init_state, setup=program.setup), out_shardings=where
                )
                state = init(jax.random.key(FLAGS.seed))
        with errors_in_one_line():
            outputs.resume(saved["metrics_bytes"] if saved else 0)
            step = progress.calls // FLAGS.every_k
            run = train_report.run_json(
                start, program.state, chosen, microbatches, plan, report, step
            )
            outputs.describe(run)
        cluster.exchange("ready")  # the slowest compiler may take longer than a collective waits

        ########################################### The steps ######################################

        signals.heeded()
        evaluate = None
        if start.data.held_out is not None and FLAGS.eval_every:
            evaluate = train_batches.evaluation(program, microbatches, start, FLAGS.eval_sequences)
        loop = train_loop.Loop(
            step=step_fn,
            batches=functools.partial(train_batches.training, program, start, FLAGS.seed),
            evaluate=evaluate,
            steps=FLAGS.steps,
            every_k=FLAGS.every_k,
            eval_every=FLAGS.eval_every,
            checkpoint_every=FLAGS.checkpoint_every,
            skips=FLAGS.on_nonfinite == "skip",
            rates=np.asarray(jax.vmap(train_program.schedule(chosen))(np.arange(FLAGS.steps))),
            tokens=FLAGS.global_batch * FLAGS.seq_len,
            outputs=outputs,
            checkpoints=checkpoints,
            signals=signals,
            profile=profile_of(start, FLAGS.profile_steps),
            facts={"mesh": dict(mesh.shape)},
            saved=progress.calls if saved else None,
        )
        with errors_with_remedy(loop, FLAGS.every_k):
            state, progress, measured, stopped = loop.run(state, progress)
        if stopped:
            at = f"step {progress.calls // FLAGS.every_k}"
            at += f", call {rest}" if (rest := progress.calls % FLAGS.every_k) else ""
            kept = (
                "saved: the same command goes on" if checkpoints else "nothing is saved (--keep=0)"
            )
            say(f"train: {stopped} at {at} of {FLAGS.steps}; {kept}.")
            sys.exit(stopping.exit_code(stopped))

        ########################################## The end ########################################

        with errors_in_one_line():
            run |= {"final_loss": float(np.mean(progress.recent)), **measured}
            run |= {"skipped": progress.skipped, "seconds": time.monotonic() - started}
            outputs.describe(run)
            outputs.chart(run["data"]["unigram_entropy"])
        unit = train_report.unit(start)
        say(
            f"final loss: {run['final_loss']:.3f} nats a {unit}, the mean of the last "
            f"{len(progress.recent)} of {FLAGS.steps} steps\n"
            f"{unit}-unigram entropy: {run['data']['unigram_entropy']:.3f} nats a {unit}\n"
            f"{comm_hooks.told(measured)}"
            f"took {run['seconds']:.0f} s; in {outputs.workdir}: metrics.jsonl run.json loss.png "
            f"tensorboard/{' checkpoints/' if checkpoints else ''}"
            f"{loop.profile.told() if loop.profile else ''}"
        )
        return run


############################################# Parts ##############################################


def check_audit(setup: Any, compiled: Any) -> None:
    """Raise AssertionError unless the compiled step is one cross-device mean."""
    branch = setup.every_k > 1 or comm_hooks.in_branch(setup.comm_hook)
    for axes in comm_hooks.audited_axes(setup.comm_hook, setup.data_axes):
        audit.assert_one_reduction(compiled, axis_name=axes, mesh=setup.mesh, conditional=branch)


def profile_of(start: train_start.Start, steps: str | None) -> Profile | None:
    if not steps:
        return None
    return Profile(start.outputs.profile_path, train_checks.parse_steps(steps), start.hosts)


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
def errors_with_remedy(loop: train_loop.Loop, every_k: int) -> Iterator[None]:
    """Exit with the message of what could not be written, and what is left: in this process alone.

    Others may be in the middle of a step, and end with it.
    """
    try:
        yield
    except ValueError as error:
        kept = loop.saved
        left = (
            "no checkpoint yet"
            if kept is None
            else f"the last checkpoint is of step {kept // every_k}"
        )
        sys.exit(f"train: {error} ({left}; the same command goes on from it.)")


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
    except stopping.Stopped as stopped:
        print(f"train: {stopped.signal} before the first step; nothing was to be saved.")
        sys.exit(stopping.exit_code(stopped.signal))
    except KeyboardInterrupt:
        sys.exit("train: stopped at once; the last checkpoint holds.")


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: train_flags.parse(argv, flags.FLAGS, __doc__))
