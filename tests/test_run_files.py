"""The program's output: one directory, one process's, each line whole and at once."""

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys

import pytest
from event_records import lines_of, shown

from absl_apps.run_files import RunFiles

FLAGS = {"seed": 1, "mesh": None, "data": ["a", "b"]}


def opened(directory, **options):
    return RunFiles(str(directory), **options)


def test_a_line_a_step_and_a_description(tmp_path):
    directory = tmp_path / "a" / "b"
    with opened(directory) as outputs:
        assert outputs.earlier is None
        outputs.describe({"flags": FLAGS})
        outputs.log(0, loss=2.5, skipped=False, note="warm", eval_loss=None)
        assert lines_of(directory)[-1]["loss"] == 2.5  # at once
        outputs.log(step=1, loss=0.1 + 0.2, tokens=7)
        outputs.describe({"flags": FLAGS, "final_loss": 2.0})
    assert (directory / "metrics.jsonl").read_text() == (
        '{"step": 0, "loss": 2.5, "skipped": false, "note": "warm", "eval_loss": null}\n'
        '{"step": 1, "loss": 0.30000000000000004, "tokens": 7}\n'
    )
    assert outputs.lines() == lines_of(directory)
    assert json.loads((directory / "run.json").read_text())["final_loss"] == 2.0
    names = ["metrics.jsonl", "run.json", "run.lock", "tensorboard"]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert shown(directory) == [
        ("loss", 0, 2.5),
        ("skipped", 0, 0.0),
        ("loss", 1, pytest.approx(0.3)),
        ("tokens", 1, 7.0),
    ]


def test_what_json_cannot_hold_is_null_and_in_tensorboard_what_it_is(tmp_path):
    with opened(tmp_path) as outputs:
        outputs.log(0, loss=math.nan, norm=math.inf)
        outputs.describe({"flags": {"x": math.nan}, "parts": [1.0, -math.inf]})
    assert lines_of(tmp_path) == [{"step": 0, "loss": None, "norm": None}]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run == {"flags": {"x": None}, "parts": [1.0, None]}
    (_, _, loss), (_, _, norm) = shown(tmp_path)
    assert math.isnan(loss)
    assert norm == math.inf


def test_what_is_no_json_is_not_half_written(tmp_path):
    with opened(tmp_path) as outputs:
        outputs.describe({"flags": FLAGS})
        with pytest.raises(TypeError, match="not JSON serializable"):
            outputs.log(0, loss=object())
        with pytest.raises(TypeError, match="not JSON serializable"):
            outputs.describe({"flags": object()})
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert json.loads((tmp_path / "run.json").read_text()) == {"flags": FLAGS}


def test_all_processes_but_one_write_nothing(tmp_path):
    workdir = tmp_path / "run"
    other = opened(workdir, writes=False)
    other.describe({"flags": FLAGS})
    other.log(0, loss=1.0)
    other.resume(100)
    other.chart()
    other.check_same({"seed": 2})
    assert other.settle() == 0
    assert other.earlier is None
    other.close()
    assert not workdir.exists()
    with opened(workdir) as outputs:
        outputs.describe({"flags": FLAGS})
        outputs.log(0, loss=1.0)
        assert opened(workdir, writes=False).earlier is None  # the directory is the run's


def test_a_chart_of_all_lines(tmp_path):
    with opened(tmp_path) as outputs:
        outputs.log(0, loss=1.0)
        with open(tmp_path / "metrics.jsonl", "a") as stream:
            stream.write('{"step": 1, "lo')  # as another process may see it
        outputs.chart(unigram_entropy=3.0)
        assert outputs.lines() == [{"step": 0, "loss": 1.0}]
        assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
        with open(tmp_path / "metrics.jsonl", "a") as stream:
            stream.write("\n")
        with pytest.raises(ValueError, match=rf"--workdir={tmp_path}: metrics.jsonl is not JSON"):
            outputs.chart()


########################################## The directory ###########################################

KEPT = "nothing of it is overwritten; give this run a --workdir of its own"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"metrics.jsonl": "{}\n"}, "holds metrics.jsonl but no run.json: is no run of this"),
        ({"checkpoints/1": "x", "tensorboard/e": ""}, "holds checkpoints and tensorboard but no"),
        ({"run.json": "precious"}, r"its run.json is not JSON \(Expecting value: line 1"),
        ({"run.json": '{"a": 1}', "metrics.jsonl": "x"}, 'its run.json has no "flags": is no run'),
        ({"run.json": "[]"}, 'its run.json has no "flags"'),
        ({"run.json": '{"flags": []}'}, 'its run.json has no "flags"'),
    ],
    ids=["metrics", "directories", "no JSON", "no flags", "a list", "flags are a list"],
)
def test_what_is_no_run_of_ours_is_refused_and_kept(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"^--workdir={tmp_path}: .*{message}.*{KEPT}") as error:
        opened(tmp_path)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_a_run_that_ended_before_its_first_step_leaves_the_directory_free(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with opened(tmp_path):
        pass
    with opened(tmp_path) as outputs:
        assert outputs.earlier is None
        outputs.describe({"flags": FLAGS})
    with opened(tmp_path) as outputs:
        assert outputs.earlier == {"flags": FLAGS}


def test_a_directory_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"/file: is a file; name a directory"):
        opened(tmp_path / "file")
    with pytest.raises(ValueError, match=r"/file/below: cannot be used: Not a directory"):
        opened(tmp_path / "file" / "below")
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"/run: cannot be used: Is a directory \(.*jsonl\)"):
        opened(tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "run.lock").symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"/full: .* \(.*/full/run.lock\); mend that"):
        opened(tmp_path / "full")


def test_no_import_of_matplotlib_or_tensorboardx_before_they_are_needed():
    program = "import sys, absl_apps.run_files, absl_apps.charts; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    modules = done.stdout.split()
    assert "absl_apps.charts" in modules
    assert not {"matplotlib", "tensorboardX"} & set(modules)


############################################# The lock #############################################


def test_a_directory_is_one_process_s_until_it_closes_it_or_is_killed(tmp_path):
    program = (
        "import sys, time; from absl_apps.run_files import RunFiles\n"
        "held = RunFiles(sys.argv[1]); held.describe({'flags': {}}); held.log(0, loss=1.0)\n"
        "print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(
                ValueError,
                match=rf"^--workdir={tmp_path}: process {process.pid} on \S+ is at work in it; "
                "stop that one first, or give this run a --workdir of its own.$",
            ):
                opened(tmp_path)
        finally:
            process.send_signal(signal.SIGKILL)
    with opened(tmp_path) as outputs:
        assert outputs.earlier == {"flags": {}}
        with pytest.raises(ValueError, match=rf"process {os.getpid()} on \S+ is at work"):
            opened(tmp_path)
    outputs.close()  # again: nothing
    opened(tmp_path).close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch, number):
    def no_locks(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with opened(tmp_path) as outputs:
        outputs.log(0, loss=1.0)
