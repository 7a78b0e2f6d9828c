"""A run that goes on from a checkpoint leaves what one that was not interrupted leaves."""

import os

import pytest
from event_records import lines_of, shown

from absl_apps.run_files import RunFiles

FLAGS = {"seed": 1, "mesh": None, "data": ["a", "b"]}


def opened(directory, **options):
    return RunFiles(str(directory), **options)


def test_flags_must_be_what_they_were(tmp_path):
    with opened(tmp_path) as outputs:
        outputs.check_same({"anything": 1})  # nothing to be the same as
        outputs.describe({"flags": FLAGS})
    with opened(tmp_path) as outputs:
        outputs.check_same({**FLAGS, "data": ("a", "b")})  # JSON has no tuples
        outputs.check_same({**FLAGS, "seed": 2, "new": 1}, may_differ={"seed", "new"})
        with pytest.raises(ValueError, match="other flags") as error:
            outputs.check_same({"seed": True, "mesh": "dp=8", "new": "x"}, may_differ=["other"])
    assert str(error.value) == (
        f"--workdir={tmp_path}: holds a run with other flags: --seed is 1 there, true here; "
        '--mesh is not set there, "dp=8" here; --data is ["a", "b"] there, unknown here; '
        '--new is unknown there, "x" here. Give them as they were to resume it, or give this run '
        "a --workdir of its own."
    )


def test_a_resumed_run_leaves_what_an_uninterrupted_one_leaves(tmp_path):
    with opened(tmp_path) as outputs:
        outputs.describe({"flags": FLAGS})
        for step in range(3):
            outputs.log(step, loss=float(step))
        offset = outputs.settle()
        for step in range(3, 6):
            outputs.log(step, loss=-1.0)
    kept = (tmp_path / "metrics.jsonl").read_bytes()[:offset]
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 6, "lo')
    for _ in range(2):  # killed once more at once
        with opened(tmp_path) as outputs:
            outputs.resume(offset)
            assert (tmp_path / "metrics.jsonl").read_bytes() == kept
            for step in range(3, 6):
                outputs.log(step, loss=float(step))
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(6))
    assert shown(tmp_path) == [("loss", step, float(step)) for step in range(6)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3  # all in one second


def test_a_run_without_a_checkpoint_starts_again(tmp_path):
    with opened(tmp_path) as outputs:
        outputs.describe({"flags": FLAGS})
        outputs.log(0, loss=5.0)
    for _ in range(2):
        with opened(tmp_path) as outputs:
            outputs.resume(0)
            assert outputs.lines() == []
            assert shown(tmp_path) == []
            outputs.log(0, loss=1.0)
        assert shown(tmp_path) == [("loss", 0, 1.0)]
        os.remove(tmp_path / "metrics.jsonl")  # no more than an empty one


def test_a_clock_that_is_behind_another_host_s_does_not_matter(tmp_path):
    with opened(tmp_path) as outputs:
        outputs.log(0, loss=5.0)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.rename(file.with_name("events.out.tfevents.4000000000.there"))
    (tmp_path / "run.json").write_text('{"flags": {}}')
    with opened(tmp_path) as outputs:
        outputs.resume(0)
        outputs.log(0, loss=1.0)
    assert shown(tmp_path) == [("loss", 0, 1.0)]


REMEDY = "put the file back as it was, or give this run a --workdir of its own"


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        (None, 1234, "metrics.jsonl is missing; it had 1,234 at the checkpoint"),
        ('{"step": 0}\n', 13, "metrics.jsonl has 12 bytes; it had 13 at the checkpoint"),
        ('{"step": 0}\n{"step": 1}\n', 20, "has no step's line up to byte 20"),
        ('{"step": 0} \n', 12, "has no step's line up to byte 12"),
        ('{"loss": 0}\n', 12, "has no step's line up to byte 12"),
        ("0123456789\n", 11, "has no step's line up to byte 11"),
    ],
    ids=["missing", "shorter", "half a line", "no end", "no step", "no line"],
)
def test_metrics_that_are_not_the_checkpoint_s_are_refused_and_kept(
    tmp_path, text, offset, message
):
    (tmp_path / "run.json").write_text('{"flags": {}}')
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with opened(tmp_path) as outputs, pytest.raises(ValueError, match=f"{message}.*: {REMEDY}"):
        outputs.resume(offset)
    path = tmp_path / "metrics.jsonl"
    assert (path.read_text() if path.exists() else None) == text
    assert not (tmp_path / "tensorboard").exists()
