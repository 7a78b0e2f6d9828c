"""The program's output: claimed once, written whole, never over another run's."""

import json

import pytest

from absl_apps.run_files import RunFiles


def test_a_line_a_step_and_a_description(tmp_path):
    outputs = RunFiles(str(tmp_path / "a" / "b"))
    outputs.describe({"flags": {"seed": 1}})
    outputs.log(step=0, loss=2.5)
    outputs.log(step=1, loss=2.0)
    outputs.describe({"flags": {"seed": 1}, "final_loss": 2.0})
    directory = tmp_path / "a" / "b"
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "loss": 2.5},
        {"step": 1, "loss": 2.0},
    ]
    assert json.loads((directory / "run.json").read_text())["final_loss"] == 2.0
    assert sorted(path.name for path in directory.iterdir()) == ["metrics.jsonl", "run.json"]


def test_what_json_cannot_hold_is_not_half_written(tmp_path):
    outputs = RunFiles(str(tmp_path))
    outputs.describe({"loss": 1.0})
    with pytest.raises(ValueError, match="JSON"):
        outputs.log(step=0, loss=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        outputs.describe({"loss": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert json.loads((tmp_path / "run.json").read_text()) == {"loss": 1.0}


def test_all_processes_but_one_write_nothing(tmp_path):
    workdir = tmp_path / "run"
    outputs = RunFiles(str(workdir), writes=False)
    outputs.describe({"loss": 1.0})
    outputs.log(step=0, loss=1.0)
    assert not workdir.exists()
    RunFiles(str(workdir)).log(step=0, loss=1.0)
    RunFiles(str(workdir), writes=False)  # what the one wrote is no other run's


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_another_run_is_refused_and_kept(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=rf"--workdir={tmp_path}: .*{name} exists, from another"):
        RunFiles(str(tmp_path))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "precious")]


def test_a_run_that_ended_before_its_first_step_leaves_the_directory_free(tmp_path):
    RunFiles(str(tmp_path)).describe({"seed": 0})
    RunFiles(str(tmp_path)).log(step=0)
    with pytest.raises(ValueError, match="from another run"):
        RunFiles(str(tmp_path))


def test_a_directory_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"/file: is a file; name a directory"):
        RunFiles(str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"/file/below: cannot be written: Not a directory"):
        RunFiles(str(tmp_path / "file" / "below"))
