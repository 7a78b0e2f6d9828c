"""A training run that goes on: as if nothing had stopped it, on other devices, or not at all."""

import shutil

import jax
import numpy as np
import pytest
from train_runs import (
    assert_same_bits,
    host,
    lines,
    losses,
    metrics,
    program,
    run,
    saved_calls,
    state,
    stopped,
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
    "powersgd": (["--comm_hook=powersgd:rank=2,min_compression_rate=1"], [1, 3]),
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

WINDOWS = ("--every_k=2", "--microbatches=1")
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
