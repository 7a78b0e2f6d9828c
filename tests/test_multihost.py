"""Several processes as one run, for real: over gloo on this machine, and what ends them.

Each process of a run starts JAX and compiles, so a run serves every test that can do with it.
"""

import json
import re
import signal

import multihost_worker
import numpy as np
import pytest
from processes import SMALL, Processes, losses, parse, wait_for_steps
from train_runs import write_text

from absl_apps import train

FOREVER = "--steps=1000000"
LEFT = {"metrics.jsonl", "run.json", "run.lock", "checkpoints", "tensorboard", "loss.png"}


@pytest.fixture
def start(tmp_path):
    """Starts processes, and ends those that a test leaves behind."""
    started = []

    def start_(n, *args, program=("-m", "absl_apps.train"), each=None):
        started.append(Processes(tmp_path, n, program, args, each))
        return started[-1]

    yield start_
    for processes in started:
        processes.end()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data"))


######################################### One run of many ########################################

RUNS = {
    # The noise scale begins as a NaN, in a state that all must hold alike.
    "two": (2, "--cpu_devices=4", "--profile_steps=1:3", "--comm_hook=gradient_noise_scale"),
    # Every row of the batch is in two processes, which hold halves of one copy of the model.
    "four": (4, "--cpu_devices=2", "--mesh=dp=2,mp=4"),
}


@pytest.fixture(scope="module", params=list(RUNS))
def runs(request, text, tmp_path_factory):
    """Processes that have ended, the directory of their run, and that of the same run in one."""
    n, devices, *args = RUNS[request.param]
    directory = tmp_path_factory.mktemp("processes")
    # No profile in this process: once libtpu has compiled in one, JAX's profiler crashes.
    common = [*SMALL, "--steps=4", f"--data={text}", *(x for x in args if "profile" not in x)]
    many = [*common, *args, f"--workdir={directory / 'many'}", devices]
    processes = Processes(directory, n, ("-m", "absl_apps.train"), many)
    try:
        train.train(parse(*common, f"--workdir={directory / 'one'}"))
        assert processes.codes(within=400) == [0] * n, processes.text(0, "err")
    finally:
        processes.end()
    return processes, directory / "many", directory / "one"


@pytest.mark.slow
def test_the_losses_are_those_of_one_process(runs):
    _, many, one = runs
    # Not the same bits: gloo adds in another order.
    np.testing.assert_allclose(losses(many), losses(one), rtol=2e-6)
    assert np.min(np.abs(np.diff(losses(one)))) > 1e-3  # far more than that


@pytest.mark.slow
def test_one_process_writes_and_prints(runs):
    processes, many, one = runs
    n = len(processes.all)
    found, alone = (json.loads((workdir / "run.json").read_text()) for workdir in (many, one))
    close = {"final_loss", "noise_scale"} & set(alone)
    same = set(alone) - {"flags", "processes", "seconds", "starts"} - close
    assert {name: found[name] for name in same} == {name: alone[name] for name in same}
    assert (found["processes"], alone["processes"]) == (n, 1)
    for name in close:
        assert found[name] == pytest.approx(alone[name], rel=1e-5)
    assert len((many / "metrics.jsonl").read_text().splitlines()) == 4
    left = {path.name for path in many.iterdir()} - {"profile"}
    assert left == {path.name for path in one.iterdir()} == LEFT

    printed = processes.text(0, "out")
    assert re.search(rf"^mesh: dp=.*, cpu, {n} processes$", printed, re.M)
    assert "one cross-device mean: checked" in printed
    for i in range(1, n):
        said = processes.printed(i)
        assert not said
    assert not processes.errors(0)


@pytest.mark.slow
def test_a7_every_process_profiles_the_same_steps(runs):
    processes, many, _ = runs
    n = len(processes.all)
    asked = "--profile_steps=1:3" in next(run for run in RUNS.values() if run[0] == n)
    files = sorted((many / "profile").rglob("*.xplane.pb"))
    # On one host, which is one name of a file: so a session of each process.
    sessions = [f"steps_1_3_process_{i}" for i in range(n if asked else 0)]
    assert [path.parent.name for path in files] == sessions
    for path in files:
        held = path.read_bytes()
        assert b"gradaccum/microbatches" in held
        assert b"gradaccum/mean" in held
    assert (f"xprof --logdir={many / 'profile'}" in processes.text(0, "out")) == asked


############################################ The rows ############################################


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of two processes of tests/multihost_worker.py saw."""
    directory = tmp_path_factory.mktemp("worker")
    program = [multihost_worker.__file__]
    each = [[str(directory / f"seen{i}")] for i in range(2)]
    processes = Processes(directory, 2, program, (), each)
    try:
        # The second ends itself by SIGTERM, which JAX would take for a notice.
        assert processes.codes(within=200) == [0, -signal.SIGTERM], processes.text(0, "err")
    finally:
        processes.end()
    return [json.loads((directory / f"seen{i}").read_text()) for i in range(2)]


@pytest.mark.parametrize("mesh", multihost_worker.MESHES)
def test_a5_the_rows_of_the_processes_cover_the_batch_and_are_disjoint_by_data(seen, mesh):
    rows = [set(process["rows"][mesh]) for process in seen]
    assert rows[0] | rows[1] == set(range(multihost_worker.BATCH))
    shared = {"model over processes": 16, "model alone": 16, "braided": 8}
    assert len(rows[0] & rows[1]) == shared.get(mesh, 0)


def test_processes_tell_each_other_everything(seen):
    for index, process in enumerate(seen):
        assert process["devices"] == 8
        assert process["exchanged"] == ["", "né"]
        assert process["nothing"] == ["", ""]
        told = "[Errno 2] No such file: 'there'"
        others = [told if i == index else f"process {i}: {told}" for i in range(2)]
        assert process["failed"] == [*others, None]
        assert process["differ"] == (
            "the processes differ: b is 0 in process 0, 1 in process 1; "
            "c is [0] in process 0, [1] in process 1; start all alike."
        )
        assert process["agreed"] == [{"a": 1, "_d": 0}, {"a": 1, "_d": 1}]


def test_a_mesh_leaves_no_process_without_a_device(seen):
    for process in seen:
        assert process["idle"] == (
            "--mesh=dp=4: takes 4 of 8 devices, and none of process 1; "
            "take all 8, or start fewer processes."
        )


########################################### Their ends ###########################################


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "other"])
def test_a_process_that_dies_ends_the_others(start, text, tmp_path, victim):
    args = [*SMALL, FOREVER, f"--data={text}", f"--workdir={tmp_path / 'run'}", "--cpu_devices=2"]
    # By this silence the others notice, or at once. The default leaves a third of the minute.
    processes = start(2, *args, "--heartbeat_timeout=4")
    assert parse().heartbeat_timeout <= 40
    wait_for_steps(processes, tmp_path / "run")
    processes.all[victim].kill()
    codes = processes.codes(within=60)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] not in (0, None)
    assert processes.errors(1 - victim)  # it says why, by gloo or by the lost heartbeat


@pytest.mark.slow
def test_an_error_in_one_process_ends_the_others(start, text, tmp_path):
    workdir = tmp_path / "run"
    args = [*SMALL, FOREVER, f"--data={text}", f"--workdir={workdir}", "--cpu_devices=1"]
    processes = start(2, *args)
    wait_for_steps(processes, workdir)
    workdir.rename(tmp_path / "gone")
    codes = processes.codes(within=60)
    assert codes[0] == 1
    assert codes[1] != 0
    assert f"train: --workdir={workdir}: cannot be used: No such file" in processes.text(0, "err")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            ["--seed=1", "--max_data_bytes=99"],
            r"the processes differ: --max_data_bytes is null in process 0, 99 in process 1; "
            r'--seed is 0 in process 0, 1 in process 1; data is "2,250 tokens, fingerprint \w+" in '
            r'process 0, "99 tokens, fingerprint \w+" in process 1; start all alike\.$',
        ),
        (["--data=/nowhere"], r"(process 1: )?--data: no file matches /nowhere\.$"),
        (["--cpu_devices=2"], r"--multihost: .* found 1 in process 0, 2 in process 1\.$"),
        (
            ["JAX_DEFAULT_MATMUL_PRECISION=highest"],
            r'the processes differ: the traced step is "\w+" in process 0, "\w+" in process 1; sta',
        ),
    ],
    ids=["flags-and-data", "no-data", "devices", "environment"],
)
def test_a8_processes_that_differ_end_with_one_line(start, text, tmp_path, own, message):
    workdir = tmp_path / "run"
    args = [*SMALL, "--steps=4", f"--data={text}", f"--workdir={workdir}", "--cpu_devices=1"]
    if "--data=/nowhere" in own:
        args.remove(f"--data={text}")
    processes = start(2, *args, each=[[f"--data={text}"], own])
    assert processes.codes(within=200) == [1, 1]
    for i in range(2):
        (line,) = processes.errors(i)
        assert re.match(f"train: {message}", line)
    # Where nothing was written, the directory is free for the next run.
    assert not workdir.exists() or not (workdir / "metrics.jsonl").read_text()


def test_a_directory_that_is_taken_is_an_error_in_all(start, text, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    args = [*SMALL, "--steps=4", f"--data={text}", f"--workdir={tmp_path}", "--cpu_devices=1"]
    processes = start(2, *args)
    assert processes.codes(within=200) == [1, 1]
    for i, who in enumerate(["", "process 0: "]):
        (line,) = processes.errors(i)
        assert line.startswith(f"train: {who}--workdir={tmp_path}: ")
