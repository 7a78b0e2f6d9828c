"""Train a byte-level language model with one cross-device mean a step.

    pip install -e '.[apps]'
    python -m absl_apps.train

Trains a decoder-only transformer of 0.85 million parameters for 150 steps on the source of the
Python standard library, data-parallel over all devices: accelerators where there are any, else
8 simulated CPU devices. First it prints what its compiled step communicates and checks that this
is one mean of the gradients. Expected: a final loss near 2.1 nats a byte, where a model of byte
frequencies alone cannot pass 3.15. Measured with jax 0.10.2 on 2 CPU cores: a loss of 2.131 in
73 s; with --mesh=dp=4,mp=2, the same batches and parameters, 2.144 in 80 s (in bfloat16 runs part
after some ten steps). The model axis mp communicates in every microbatch, dp once.

Sharded state:      python -m absl_apps.train --sharding=fsdp --mesh=replica=2,dp=4
Tensor parallel:    python -m absl_apps.train --mesh=dp=4,mp=2 --sequence_parallel
Gradients in int8:  python -m absl_apps.train --comm_hook=int8_quantize:error_feedback=True
Text of your own:  python -m absl_apps.train --data='books/*.txt' --workdir=runs/books
Several hosts, one command on each; where the cluster does not say which of them this is, as a TPU
pod does, --coordinator_address=HOST:PORT --num_processes=N --process_id=I do:
                   python -m absl_apps.train --multihost --profile_steps=10:15
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import (
    cluster,
    comm_hooks,
    flag_parsing,
    meshes,
    microbatch_flags,
    run_files,
    text_data,
    train_flags,
    train_loop,
    train_program,
    transformer,
)
from absl_apps.optimizers import make_optimizer, make_schedule
from absl_apps.train_state import TrainState, init_state, state_specs
from absl_apps.train_step import make_step
from gradaccum import audit

FINAL_STEPS = 10  # the final loss is the mean over these: a single step's is noisy


########################################## The program ###########################################


def train(FLAGS: flags.FlagValues) -> dict[str, Any]:  # noqa: N803
    """Run the whole program; return what run.json holds at its end."""
    started = time.monotonic()

    ################### What the user can get wrong, before anything is computed ###################

    with errors_in_one_line():
        config = transformer.Config(FLAGS.d_model, FLAGS.n_layer, FLAGS.n_head, FLAGS.compute_dtype)
        asked = FLAGS.mesh or f"{meshes.DATA_AXIS}={jax.device_count()}"
        axes = meshes.parse(asked)
        train_flags.check_model_axis(axes, config, FLAGS.seq_len, FLAGS.sequence_parallel)
        mesh = meshes.make(axes, f"--mesh={asked}", simulate="--cpu_devices")
        data_axes = meshes.data_axes(mesh)
        devices = math.prod(mesh.shape[axis] for axis in data_axes)
        microbatch_flags.check(FLAGS.microbatches, FLAGS.hbm_gb)
        planned = FLAGS.microbatches == microbatch_flags.AUTO
        train_flags.check_batch(FLAGS.global_batch, 1 if planned else FLAGS.microbatches, devices)
        limit = microbatch_flags.memory_limit(FLAGS.hbm_gb)
        if planned:
            train_program.check_limit(mesh, limit)
        hook = FLAGS.comm_hook and comm_hooks.parse(FLAGS.comm_hook)
        comm_hooks.check_axes(hook, data_axes)
        chosen = [text_data.default_pattern()] if FLAGS.data is None else FLAGS.data
        files = text_data.find_files([part for text in chosen for part in text.split(",") if part])
        data = text_data.load(files, FLAGS.max_data_bytes)
        text_data.check_length(data, FLAGS.seq_len)
    with errors_in_one_line():
        # What differs between processes would have them wait for each other for ever.
        facts = train_flags.agreed(FLAGS) | run_files.environment(mesh)["versions"]
        del facts["python"]  # its patches do no harm
        facts["num_processes"] = FLAGS.num_processes or jax.process_count()
        facts["data"] = f"{data.size:,} bytes, SHA-256 {text_data.checksum(data)}"
        workdir = FLAGS.workdir or os.path.join("runs", time.strftime("%Y%m%d-%H%M%S"))
        told = cluster.agree(facts | {"_workdir": workdir, "_host": platform.node()})
        outputs = run_files.RunFiles(told[0]["_workdir"], writes=jax.process_index() == 0)

    say = functools.partial(print, flush=True) if outputs.writes else lambda _: None
    microbatches, plan = FLAGS.microbatches, None
    if planned:
        with errors_in_one_line():
            plan = train_program.plan(flag_parsing.chosen(FLAGS, train_flags.GROUPS), mesh, limit)
        # Processes may be allowed a little more or less; all take what fits on each.
        microbatches = max(map(int, cluster.exchange(str(plan.microbatches))))
        say(f"--microbatches=auto: {microbatches}, of what was compiled:\n{plan}\n")

    ############################# The model and its state, on the mesh #############################

    peak = FLAGS.learning_rate
    if peak is None:
        peak = train_flags.LEARNING_RATES[FLAGS.optimizer]
    tx = make_optimizer(FLAGS.optimizer, make_schedule(peak, FLAGS.warmup_steps, FLAGS.steps))

    # Made in place, each device its own part: the whole state may not fit on one.
    specs, grad_specs = state_specs(FLAGS.sharding, config, tx, mesh)
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    init = jax.jit(lambda key: init_state(key, config, tx), out_shardings=where)

    split = NamedSharding(mesh, P(data_axes))
    rows = meshes.local_rows(split, FLAGS.global_batch)

    def load_batch(step: int) -> jax.Array:
        """The batch of a step, uint8 [B, seq_len + 1]: inputs, and targets one byte later."""
        shape = FLAGS.global_batch, FLAGS.seq_len + 1
        tokens = text_data.sample(data, FLAGS.seed, step, *shape, rows)  # this process's alone
        return jax.make_array_from_process_local_data(split, tokens, shape)

    state = init(jax.random.key(FLAGS.seed))
    hooked = None
    if hook:
        with errors_in_one_line():  # what the hook refuses
            tx, opt_state = comm_hooks.chained(hook, tx, *state, grad_specs, mesh, data_axes)
        state = TrainState(state.params, opt_state)
        hooked = jax.tree.map(lambda x: x.sharding, state)
    entropy = text_data.unigram_entropy(data)
    along = " and ".join(data_axes)
    per_device = FLAGS.global_batch // (microbatches * devices)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    processes = jax.process_count()
    say(
        f"data: {data.size:,} bytes of {len(files)} files\n"
        f"byte-unigram entropy: {entropy:.3f} nats a byte\n"
        f"model: {transformer.size(state.params):,} parameters\n"
        f"mesh: {','.join(f'{axis}={n}' for axis, n in mesh.shape.items())}, "
        f"{mesh.devices.flat[0].device_kind}"
        f"{f', {processes} processes' if processes > 1 else ''}\n"
        f"state: {held:,} bytes of parameters and optimizer on each device, {FLAGS.sharding}\n"
        f"batch: {FLAGS.global_batch} = {devices} devices along {along} * "
        f"{microbatches} microbatches * {per_device} sequences of {FLAGS.seq_len} bytes"
    )

    ####################### One compilation: the step audited is the step run ######################

    options = FLAGS.sharding, FLAGS.sequence_parallel, hooked
    step_fn = make_step(config, mesh, microbatches, tx, *options)
    with errors_in_one_line() if hook else contextlib.nullcontext():
        step_fn = step_fn.lower(state, load_batch(0))
    with errors_in_one_line():
        cluster.agree_on_program(step_fn)
    step_fn = step_fn.compile()
    cluster.exchange("compiled")  # the slowest compiler may take longer than a collective waits
    report = audit.collectives(step_fn, mesh=mesh)
    say(f"\nwhat one step communicates:\n{report}")
    branch = comm_hooks.in_branch(hook)
    for axes in comm_hooks.audited_axes(hook, data_axes):
        audit.assert_one_reduction(step_fn, axis_name=axes, mesh=mesh, conditional=branch)
    checked = "one cross-device mean: checked"
    say((f"one device along {along}: no mean" if devices == 1 else checked) + "\n")

    run = {
        "flags": flag_parsing.chosen(FLAGS, train_flags.GROUPS),
        **run_files.environment(mesh),
        "mesh": dict(mesh.shape),
        "processes": processes,
        "microbatches": microbatches,
        "plan": plan and dataclasses.asdict(plan),
        "parameters": transformer.size(state.params),
        "state_bytes": held,  # of each device
        "data": {"files": len(files), "bytes": data.size, "unigram_entropy": entropy},
        "audit": {
            "totals": {axis: dataclasses.asdict(total) for axis, total in report.totals.items()},
            "collectives": [dataclasses.asdict(row) for row in report],
        },
    }

    outputs.describe(run)
    tokens_a_step = FLAGS.global_batch * FLAGS.seq_len
    profile = None
    if FLAGS.profile_steps:
        steps = train_flags.parse_steps(FLAGS.profile_steps)
        profile = train_loop.Profile(outputs.profile_path, steps, [t["_host"] for t in told])
    args = step_fn, state, load_batch, FLAGS.steps, tokens_a_step, outputs, profile
    losses, measured = train_loop.run_steps(*args)

    ######################################## The end ##########################################

    last = losses[-FINAL_STEPS:]
    run |= {"final_loss": sum(last) / len(last), **measured}
    run["seconds"] = time.monotonic() - started
    outputs.describe(run)
    say(
        f"final loss: {run['final_loss']:.3f} nats a byte, the mean of the last {len(last)} of "
        f"{FLAGS.steps} steps\n"
        f"byte-unigram entropy: {entropy:.3f} nats a byte\n"
        f"{comm_hooks.told(measured)}"
        f"took {run['seconds']:.0f} s; files: {outputs.metrics_path} {outputs.run_path}"
        f"{profile.told() if profile else ''}"
    )
    return run


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Exit with the message, not a traceback, where the mistake is the user's: all processes do."""
    try:
        with cluster.failing_together():
            yield
    except ValueError as error:
        sys.exit(f"train: {error}")


def main(argv: list[str]) -> None:
    del argv  # train_flags.parse has refused all but flags
    FLAGS = flags.FLAGS
    meshes.prepare_platform(FLAGS.cpu_devices)
    if not FLAGS.multihost:
        meshes.first_query()
        train(FLAGS)
        return
    with cluster.ending_together():
        cluster.join("train", FLAGS)  # makes the first device query
        train(FLAGS)


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: train_flags.parse(argv, flags.FLAGS, __doc__))
