"""Disks that are full, directories that cannot be used: one line, and the run can go on."""

import contextlib
import errno
import json
import os

import pytest
from train_runs import (
    lines,
    metrics,
    refused,
    run,
    saved_calls,
    stopped,
    unchanged,
    write_text,
)

from absl_apps import checkpoint_files, run_files, whole_writes


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return f"--data={write_text(tmp_path_factory.mktemp('data'))}"


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The directory of a run that nothing stopped."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    run(workdir, text)
    return workdir


########################################### Full disks ###########################################


def no_space(path):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@contextlib.contextmanager
def growing(name, room):
    """A disk on which files of this name may grow by so many bytes."""
    write, left = os.write, room

    def limited(file, piece):
        nonlocal left
        if name not in os.readlink(f"/proc/self/fd/{file}"):
            return write(file, piece)
        if not left:
            raise no_space(None)
        taken = write(file, piece[:left])
        left -= taken
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", limited)
        yield


@contextlib.contextmanager
def writing(module, function, name):
    """A disk that is full when a file whose path holds this is written."""
    there = getattr(module, function)

    def limited(path, contents):
        if name in path:
            raise no_space(path)
        there(path, contents)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, limited)
        yield


# What is full when; what is said; steps logged, and calls saved.
FULL = {
    "metrics": (
        growing("metrics.jsonl", 400),
        r"cannot be used: No space left on device \(.*/run/metrics\.jsonl\); mend that",
        (2, [2]),
    ),
    "events": (
        growing("tfevents", 500),
        r"cannot be used: No space left on device \(.*/tensorboard/.*\); mend that",
        (4, [2]),
    ),
    "checkpoint": (
        writing(checkpoint_files, "write", "/4.orbax-checkpoint-tmp"),
        r"checkpoints/4 could not be written: No space left on device; the newest whole one is of "
        r"call 2\. Mend that, and start again with the same flags\.$",
        (6, [2]),
    ),
    "first checkpoint": (
        writing(checkpoint_files, "write", "/2.orbax-checkpoint-tmp"),
        r"checkpoints/2 could not be written: No space left on device; there is none\. Mend that",
        (4, []),
    ),
    "chart": (
        writing(whole_writes, "replace", "loss.png"),
        r"cannot be used: No space left on device \(.*/run/loss\.png\); mend that",
        (6, [2, 4, 6]),
    ),
    "first event": (
        growing("tfevents", 0),
        r"cannot be used: No space left on device \(.*/tensorboard/.*\); mend that",
        (0, None),
    ),
    "description": (
        writing(whole_writes, "replace", "run.json"),
        r"cannot be used: No space left on device \(.*/run/run\.json\); mend that",
        (0, None),
    ),
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_one_line_and_the_run_goes_on(what, text, whole, tmp_path):
    full, message, (steps, calls) = FULL[what]
    workdir = tmp_path / "run"
    with full:
        refused(workdir, text, match=rf"^train: --workdir.*: .*{message}")
    assert lines(workdir) == lines(whole)[:steps]  # no half of one
    assert (saved_calls(workdir) if (workdir / "checkpoints").exists() else None) == calls
    assert not (workdir / "loss.png").exists()
    run(workdir, text)
    assert lines(workdir) == lines(whole)
    assert (workdir / "loss.png").stat().st_size > 1000
    assert saved_calls(workdir) == [2, 4, 6]
    assert "final_loss" in json.loads((workdir / "run.json").read_text())


############################################ Workdirs ############################################


def test_a_directory_below_a_file_is_refused(text, tmp_path):
    (tmp_path / "file").write_text("mine")
    with unchanged(tmp_path):
        refused(
            *(tmp_path / "file" / "run", text),
            match=r"^train: --workdir=.*/file/run: cannot be used: Not a directory \(.*\); mend ",
        )


def test_a_directory_that_another_process_holds_is_refused(text, whole):
    with run_files.RunFiles(str(whole)), unchanged(whole):
        refused(
            *(whole, text),
            match=rf"^train: --workdir=.*: process {os.getpid()} on .* is at work in it; stop that",
        )


def test_a_run_that_ended_lets_go_of_its_directory(text, whole):
    run_files.RunFiles(str(whole)).close()


############################################## Kept ##############################################


def test_the_newest_checkpoint_alone_is_kept(text, tmp_path):
    run(tmp_path / "run", text, "--keep=1", "--checkpoint_every=1")
    assert saved_calls(tmp_path / "run") == [6]


def test_checkpoints_at_the_end_and_at_a_stop_alone(text, whole, tmp_path):
    stopped(tmp_path / "run", text, "--checkpoint_every=0", stop=3)
    run(tmp_path / "run", text, "--checkpoint_every=0")
    assert saved_calls(tmp_path / "run") == [3, 6]
    assert lines(tmp_path / "run") == lines(whole)


def test_a_run_without_checkpoints_begins_again(text, whole, tmp_path, capsys):
    args = (text, "--keep=0", "--checkpoint_every=0")
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path / "run", *args, stop=3)
    assert exit_.value.code == 0
    said = "train: SIGTERM at step 3 of 6; nothing is saved (--keep=0).\n"
    assert capsys.readouterr().out.endswith(said)
    assert len(metrics(tmp_path / "run")) == 3
    run(tmp_path / "run", *args)
    assert lines(tmp_path / "run") == lines(whole)
    assert not (tmp_path / "run" / "checkpoints").exists()
