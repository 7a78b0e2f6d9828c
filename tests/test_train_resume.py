"""A training run that goes on: as if nothing had stopped it, on other devices, or not at all."""

import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_runs import (
    assert_same_bits,
    contents,
    host,
    lines,
    losses,
    metrics,
    newest,
    program,
    refused,
    run,
    saved_calls,
    state,
    stopped,
    unchanged,
    write_text,
)

from absl_apps import train_resume
from absl_apps.checkpoints import Checkpoints

########################################### Cut in two ###########################################

# Flags, and the calls after which the run is stopped, one after the other.
CUT = {
    # Before the first checkpoint, at the call of one, between two.
    "steps of one call": (["--eval_fraction=0.1", "--eval_every=2"], [1, 4, 5]),
    # In mid-window, between windows, and in mid-window again.
    "int8 in windows": (
        [
            *("--every_k=2", "--microbatches=1", "--dropout=0.1"),
            "--comm_hook=int8_quantize:error_feedback=True",
        ],
        [5, 6, 11],
    ),
    "powersgd": (["--comm_hook=powersgd:rank=2,start_step=2,min_compression_rate=1"], [1, 3]),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return f"--data={write_text(tmp_path_factory.mktemp('data'))}"


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Name of CUT -> the directory of its run that nothing stopped."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole") / "run"
            run(made[name], text, *CUT[name][0])
        return made[name]

    return get


@pytest.mark.parametrize("name", CUT)
def test_a_run_that_is_cut_is_the_whole_one_to_the_last_bit(name, text, whole, tmp_path):
    args, stops = CUT[name]
    for stop in stops:
        stopped(tmp_path / "run", text, *args, stop=stop)
    result = run(tmp_path / "run", text, *args)
    assert lines(tmp_path / "run") == lines(whole(name))
    assert len(set(losses(whole(name)))) == 6  # so lines could differ
    assert_same_bits(state(tmp_path / "run", *args), state(whole(name), *args))
    every_k = 2 if "--every_k=2" in args else 1
    assert [start["step"] for start in result["starts"]] == [0, *(x // every_k for x in stops)]


def test_hooks_and_windows_are_in_what_is_compared(whole):
    """Else bits that are not restored would not show above."""
    int8 = state(whole("int8 in windows"), *CUT["int8 in windows"][0])
    errors = [x for path, x in int8.items() if ".comm_state" in path and "rows" in path]
    assert sum(np.count_nonzero(x) for x in errors) > 1000
    powersgd = state(whole("powersgd"), *CUT["powersgd"][0])
    errors = [x for path, x in powersgd.items() if ".comm_state" in path and "rows" in path]
    assert sum(np.count_nonzero(x) for x in errors) > 1000


######################################### On other devices #######################################

WINDOWS = ("--every_k=2", "--global_batch=32")
ELSEWHERE = [
    ("dp=8", "dp=4"),
    ("dp=8", "dp=4,mp=2"),
    ("dp=4,mp=2", "dp=8"),
    ("fsdp=8", "dp=4"),
    ("replica=2,fsdp=4", "dp=8"),
]


@pytest.fixture(scope="module")
def in_mid_window(text, tmp_path_factory):
    """Mesh -> the directory of a run on it that was stopped at call 5, in step 2."""
    made = {}

    def get(mesh):
        if mesh not in made:
            made[mesh] = tmp_path_factory.mktemp("stopped") / "run"
            stopped(made[mesh], text, *WINDOWS, f"--mesh={mesh}", stop=5)
        return made[mesh]

    return get


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory):
    """Losses of the run on dp=8 that nothing stopped."""
    workdir = tmp_path_factory.mktemp("reference") / "run"
    run(workdir, text, *WINDOWS, "--mesh=dp=8")
    return losses(workdir)


@pytest.mark.parametrize(("here", "there"), ELSEWHERE, ids=[" to ".join(x) for x in ELSEWHERE])
def test_a_window_is_closed_on_another_mesh(here, there, text, in_mid_window, reference, tmp_path):
    before, moved = in_mid_window(here), (*WINDOWS, f"--mesh={there}")
    shutil.copytree(before, tmp_path / "run")
    run(tmp_path / "run", text, *moved)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(6))
    np.testing.assert_allclose(losses(tmp_path / "run"), reference, rtol=1e-5)

    saved, built = state(before, *WINDOWS, f"--mesh={here}"), program(*moved)
    with Checkpoints(str(before / "checkpoints"), keep=1) as checkpoints:
        got = train_resume.restored(built, checkpoints, checkpoints.facts(5))
    leaves = jax.tree_util.tree_flatten_with_path(got)[0]
    for (path, x), like in zip(leaves, jax.tree.leaves(built.state), strict=True):
        name = jax.tree_util.keystr(path)
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim), name
        if ".acc_grads" in name or ".weight" in name:  # a row a data device
            assert np.any(saved[name]) or x.dtype == jax.dtypes.float0, name
            sums = (np.sum(rows, axis=0, dtype=np.float64) for rows in (host(x), saved[name]))
            np.testing.assert_allclose(*sums, rtol=1e-6, atol=1e-7, err_msg=name)
        else:
            assert host(x).tobytes() == saved[name].tobytes(), name


def test_errors_of_a_hook_are_moved_to_another_mesh(text, whole, tmp_path):
    """PowerSGD's update is one of the mean of gradients and errors: devices do not matter."""
    args = CUT["powersgd"][0]
    stopped(tmp_path / "run", text, *args, stop=4)
    run(tmp_path / "run", text, *args, "--mesh=dp=4")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(whole("powersgd")), rtol=1e-5)


def test_a_run_goes_on_with_other_flags_that_leave_it_the_same_run(text, whole, tmp_path):
    args, _ = CUT["steps of one call"]
    stopped(tmp_path / "run", text, *args, stop=3)
    shutil.copy(text.removeprefix("--data="), tmp_path / "moved.txt")
    others = ("--microbatches=1", "--remat=none", "--eval_every=5", "--on_nonfinite=skip")
    others += ("--checkpoint_every=1", "--keep=1", f"--data={tmp_path / 'moved.txt'}")
    run(tmp_path / "run", *args, *others)
    assert saved_calls(tmp_path / "run") == [6]
    got, want = metrics(tmp_path / "run"), metrics(whole("steps of one call"))
    evaluated = [[line["step"] for line in run if "eval_loss" in line] for run in (got, want)]
    assert evaluated == [[1, 4, 5], [1, 3, 5]]
    for name in ("loss", "gradient_norm"):
        one, other = ([line[name] for line in run] for run in (got, want))
        assert one[:3] == other[:3]  # taken by one program
        np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(got[5]["eval_loss"], want[5]["eval_loss"], rtol=1e-5)


############################################ Refusals ############################################

PLAIN = CUT["steps of one call"][0]


@pytest.fixture(scope="module")
def interrupted(text, tmp_path_factory):
    """The directory of a run that was stopped: checkpoints of calls 2, 4 and 5."""
    workdir = tmp_path_factory.mktemp("interrupted") / "run"
    stopped(workdir, text, *PLAIN, stop=5)
    return workdir


@pytest.fixture
def workdir(interrupted, tmp_path):
    """A copy of it."""
    return shutil.copytree(interrupted, tmp_path / "run")


@pytest.mark.parametrize(
    ("flag", "there"),
    [
        ("--d_model=32", "16"),
        ("--n_layer=2", "1"),
        ("--seed=1", "0"),
        ("--learning_rate=0.01", "0.03"),
        ("--steps=8", "6"),  # which the schedule ends with
        ("--steps=4", "6"),
        ("--every_k=2", "1"),
        ("--global_batch=32", "16"),
        ("--dropout=0.5", "0.0"),
        ("--comm_hook=powersgd", "not set"),
    ],
)
def test_another_run_is_refused(flag, there, text, workdir):
    name, _, here = flag.partition("=")
    here = f'"{here}"' if here.isalpha() else here
    with unchanged(workdir):
        refused(
            *(workdir, text, *PLAIN, "--microbatches=1", flag),
            match=rf"holds a run with other flags: {name} is {there} there, {here} here\. Give",
        )


def test_other_data_is_refused(text, workdir, tmp_path):
    held = pathlib.Path(text.removeprefix("--data=")).read_text()
    (tmp_path / "other.txt").write_text(held.replace("fox", "cat", 1))
    with unchanged(workdir):
        refused(
            *(workdir, f"--data={tmp_path / 'other.txt'}", *PLAIN),
            match=r"--data: not what the run in .* was trained on \(SHA-256 \w+ there, \w+ here\)",
        )


DESCRIPTIONS = {
    "of another program": ('{"flags": {"lr": 1.0}}', r"other flags: --lr is 1\.0 there, unknown h"),
    "without flags": ('{"model": "mine"}', r'run\.json has no "flags": is no run of this program'),
    "garbled": ('{"flags": {', r"its run\.json is not JSON \(.*\): is no run of this program"),
    "empty": ("", r"its run\.json is not JSON \(.*\): is no run of this program"),
    "missing": (None, r"holds metrics\.jsonl and checkpoints and tensorboard but no run\.json"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_what_is_no_run_of_this_program_is_refused(name, text, workdir):
    described, message = DESCRIPTIONS[name]
    (workdir / "run.json").unlink()
    if described is not None:
        (workdir / "run.json").write_text(described)
    with unchanged(workdir):
        refused(workdir, text, *PLAIN, match=message)


def damage_bits(path):
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


DAMAGES = {
    "a bit": (damage_bits, "is garbled"),
    "truncated": (lambda path: os.truncate(path, 100), "has 100 of .* bytes"),
    "missing": (os.remove, "is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_what_is_said_helps(name, text, workdir, whole):
    damage, message = DAMAGES[name]
    files = [path for path in (workdir / "checkpoints" / "5").rglob("*") if path.is_file()]
    damage(max(files, key=lambda path: path.stat().st_size))
    with unchanged(workdir):
        refused(
            *(workdir, text, *PLAIN),
            match=rf"checkpoints/5: .* {message}; move it away, .* from that of call 4\.$",
        )
    if name != "missing":
        return
    shutil.move(workdir / "checkpoints" / "5", workdir / "away")
    run(workdir, text, *PLAIN)
    assert lines(workdir) == lines(whole("steps of one call"))


def test_what_a_kill_left_half_written_is_removed(text, workdir, whole):
    checkpoints = workdir / "checkpoints"
    for name in ("6.orbax-checkpoint-tmp-1234", "2.removed"):
        shutil.copytree(checkpoints / "5", checkpoints / name)
    (workdir / "run.json.partial").write_text('{"fla')
    with open(workdir / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 5, "loss": 3.')
    result = run(workdir, text, *PLAIN)
    assert result["starts"][-1]["step"] == 5
    assert saved_calls(workdir) == [4, 5, 6]
    assert lines(workdir) == lines(whole("steps of one call"))


def test_metrics_that_lack_a_step_are_refused(text, workdir):
    held = (workdir / "metrics.jsonl").read_bytes()
    (workdir / "metrics.jsonl").write_bytes(held[: held[:-1].rindex(b"\n") + 1])
    with unchanged(workdir):
        refused(
            *(workdir, text, *PLAIN),
            match=rf"metrics\.jsonl has .* bytes; it had {len(held):,} at the checkpoint: put",
        )


def test_a_state_of_other_shapes_is_refused(text, workdir):
    """As one that an older version of the program saved."""
    with Checkpoints(str(workdir / "checkpoints"), keep=9) as checkpoints:
        older = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), program(*PLAIN).state)
        older.params["embed"] = jnp.zeros((255, 16))
        facts = checkpoints.facts(5)
        checkpoints.save(6, older, {**facts, "progress": {**facts["progress"], "calls": 6}})
    with unchanged(workdir):
        refused(
            *(workdir, text, *PLAIN),
            match=r"checkpoints/6 is of another state: .params\['embed'\] is float32\[255, 16\], "
            r"needed float32\[256, 16\]\. Run with",
        )


########################################## At the end ############################################


def test_a_finished_run_says_so_and_changes_nothing(text, whole, tmp_path, capsys):
    workdir = shutil.copytree(whole("steps of one call"), tmp_path / "run")
    with unchanged(workdir):
        result = run(workdir, text, *PLAIN, "--checkpoint_every=1", "--keep=1", "--mesh=dp=4")
    assert capsys.readouterr().out == (
        f"train: --workdir={workdir}: all 6 steps are taken already.\n"
    )
    assert result == json.loads((workdir / "run.json").read_text())


@pytest.mark.parametrize("lacks", ["final_loss", "loss.png"])
def test_a_run_that_was_killed_after_its_last_step_is_ended(lacks, text, whole, tmp_path):
    workdir = shutil.copytree(whole("steps of one call"), tmp_path / "run")
    chart = (workdir / "loss.png").read_bytes()
    (workdir / "loss.png").unlink()
    earlier = json.loads((workdir / "run.json").read_text())
    if lacks == "final_loss":
        unended = {k: v for k, v in earlier.items() if k not in ("final_loss", "skipped")}
        (workdir / "run.json").write_text(json.dumps(unended))
    before = contents(workdir)
    result = run(workdir, text, *PLAIN)
    assert result["final_loss"] == earlier["final_loss"] == np.mean(losses(workdir))
    assert json.loads((workdir / "run.json").read_text())["skipped"] == 0
    assert (workdir / "loss.png").read_bytes() == chart
    after = contents(workdir)
    for name in ("metrics.jsonl", *(n for n in before if n.startswith("checkpoints"))):
        assert after[name] == before[name]
    assert newest(workdir) == 6
