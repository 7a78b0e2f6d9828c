"""A notice to one of several processes stops all of them, at one call, with all saved."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from processes import ROOT, Processes, environment, losses, parse, wait_for_steps
from train_runs import write_text

from absl_apps import train

STEPS = 300
RUN = (
    *("--d_model=16", "--n_layer=1", "--n_head=2", "--seq_len=16", "--compute_dtype=float32"),
    *("--global_batch=32", "--microbatches=2", "--every_k=2", "--optimizer=sgd"),
    *(f"--steps={STEPS}", "--learning_rate=0.1", "--checkpoint_every=0", "--eval_every=0"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The losses of a run in this process that nothing stops."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train.train(parse(*RUN, f"--data={text}", f"--workdir={workdir}"))
    return losses(workdir)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "noticed"), [(2, 1), (4, 0)])
def test_a_notice_to_one_saves_for_all(text, whole, tmp_path, n, noticed):
    workdir = tmp_path / "run"
    args = [*RUN, f"--data={text}", f"--workdir={workdir}"]
    processes = Processes(
        tmp_path, n, ("-m", "absl_apps.train"), [*args, f"--cpu_devices={8 // n}"]
    )
    try:
        wait_for_steps(processes, workdir)
        processes.all[noticed].send_signal(signal.SIGTERM)
        assert processes.codes(within=100) == [0] * n, processes.text(0, "err")
    finally:
        processes.end()
    taken = len(losses(workdir))
    assert 2 <= taken < STEPS
    assert processes.printed(0)[-1].startswith(f"train: SIGTERM at step {taken}")
    assert not any(processes.printed(i) for i in range(1, n))
    # One process goes on, with the same devices all its own.
    train.train(parse(*args))
    # Not the same bits: gloo adds in another order.
    np.testing.assert_allclose(losses(workdir), whole, rtol=1e-4)


@pytest.mark.slow
def test_ctrl_c_in_one_of_several_saves_for_all(text, tmp_path):
    workdir = tmp_path / "run"
    args = [*RUN, f"--data={text}", f"--workdir={workdir}", "--cpu_devices=1"]
    processes = Processes(tmp_path, 2, ("-m", "absl_apps.train"), args)
    try:
        wait_for_steps(processes, workdir)
        processes.all[0].send_signal(signal.SIGINT)
        assert processes.codes(within=100) == [130, 0]
    finally:
        processes.end()
    taken = len(losses(workdir))
    assert processes.printed(0)[-1].startswith(f"train: SIGINT at step {taken}")
    assert [path.name for path in (workdir / "checkpoints").iterdir()]


def test_a_signal_before_the_first_step_ends_in_one_line(text, tmp_path):
    command = [sys.executable, "-m", "absl_apps.train", *RUN, f"--data={text}"]
    process = subprocess.Popen(
        [*command, f"--workdir={tmp_path / 'run'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(PYTHONUNBUFFERED="1"),
    )
    with process:
        for line in process.stdout:
            if line.startswith("model: "):  # it is about to compile
                process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    # It may come in the middle of another line.
    assert line.endswith(
        "train: SIGTERM before the first step of this start; nothing new to save.\n"
    )
