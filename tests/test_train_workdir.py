"""What a training run finds in its --workdir: nothing is overwritten, and a run ends once."""

import importlib.util
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_runs import (
    contents,
    lines,
    losses,
    newest,
    program,
    refused,
    run,
    saved_calls,
    stopped,
    unchanged,
    write_text,
)

from absl_apps.checkpoints import Checkpoints

PLAIN = ("--eval_fraction=0.1", "--eval_every=2")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return f"--data={write_text(tmp_path_factory.mktemp('data'))}"


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The directory of a run that nothing stopped."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    run(workdir, text, *PLAIN)
    return workdir


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
            match=r"--data or --eval_data: not what the run in .* has \(fingerprint \w+ there, \w+",
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
    assert lines(workdir) == lines(whole)


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
    assert lines(workdir) == lines(whole)


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
    workdir = shutil.copytree(whole, tmp_path / "run")
    with unchanged(workdir):
        result = run(workdir, text, *PLAIN, "--checkpoint_every=1", "--keep=1", "--mesh=dp=4")
    assert capsys.readouterr().out == (
        f"train: --workdir={workdir}: all 6 steps are taken already.\n"
    )
    assert result == json.loads((workdir / "run.json").read_text())


@pytest.mark.parametrize("lacks", ["final_loss", "loss.png"])
def test_a_run_that_was_killed_after_its_last_step_is_ended(lacks, text, whole, tmp_path):
    workdir = shutil.copytree(whole, tmp_path / "run")
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


def test_a_finished_run_without_checkpoints_is_not_begun_again(text, whole, tmp_path, capsys):
    workdir = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints")
    with unchanged(workdir):
        for keep in (0, 1):
            run(workdir, text, *PLAIN, f"--keep={keep}", "--checkpoint_every=0")
            assert "all 6 steps are taken already." in capsys.readouterr().out


def test_checkpoints_are_not_passed_over(text, workdir):
    """To begin again would cut off the metrics of all steps."""
    with unchanged(workdir):
        refused(
            *(workdir, text, *PLAIN, "--keep=0", "--checkpoint_every=0"),
            match=r"--keep=0: a run without checkpoints begins at step 0, and --workdir=.* has som",
        )


@pytest.mark.parametrize("library", ["grain", "matplotlib", "orbax", "tensorboardX", "tqdm"])
def test_a_missing_library_is_told_at_the_start(monkeypatch, tmp_path, library):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != library or None)
    refused(tmp_path / "run", match=rf"{library} is not installed; pip install .*\[apps\]")
    assert not (tmp_path / "run").exists()
