"""--profile_steps: which steps, which scopes, which files, and what becomes of a run cut short."""

import math
import warnings

import jax
import pytest
from absl import flags

from absl_apps import run_files, train, train_flags, train_loop
from absl_apps.train_state import TrainState

SCOPES = (b"gradaccum/microbatches", b"gradaccum/mean")


def parse(*args):
    values = flags.FlagValues()
    train_flags.parse(["train", *args], values, manual="")
    return values


def stats_of(path):
    """Yields the name and what else is known of each event of a trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of its binding, not of its use
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    yield event.name, dict(event.stats)


def steps_in(path):
    """Returns the steps that a trace marks, by their numbers."""
    return sorted(stats["step_num"] for name, stats in stats_of(path) if name == "train")


def trace_of(workdir):
    (path,) = (workdir / "profile").rglob("*.xplane.pb")
    return path


def assert_closed(directory):
    """Asserts that no trace is open: JAX refuses a second one."""
    with jax.profiler.trace(directory / "another"):
        pass


@pytest.fixture
def take(tmp_path):
    """Takes steps that compute next to nothing; returns their losses."""

    def take_(losses, profiled, steps=None):
        outputs = run_files.RunFiles(str(tmp_path))
        profile = train_loop.Profile(outputs.profile_path, profiled, ["here"])
        step_fn = lambda state, tokens: (state, losses[tokens])  # noqa: E731
        batches = lambda step: step  # noqa: E731
        args = step_fn, TrainState({}, ()), batches, steps or len(losses), 1, outputs, profile
        return train_loop.run_steps(*args)[0]

    return take_


@pytest.mark.parametrize("profiled", [range(1), range(2, 4), range(3, 5)], ids=str)
def test_the_profile_holds_the_steps_asked_for(take, tmp_path, profiled):
    assert take([1.0, 2.0, 3.0, 4.0, 5.0], profiled) == [1.0, 2.0, 3.0, 4.0, 5.0]
    path = trace_of(tmp_path)
    assert steps_in(path) == list(profiled)
    assert path.parent.name == f"steps_{profiled.start}_{profiled.stop}"
    assert_closed(tmp_path)


def test_a_run_cut_short_leaves_its_profile(take, tmp_path):
    with pytest.raises(SystemExit, match="the loss is nan at step 2"):
        take([1.0, 2.0, math.nan, 4.0, 5.0], range(1, 5))
    assert steps_in(trace_of(tmp_path)) == [1, 2]
    assert_closed(tmp_path)


def test_a_step_that_fails_leaves_its_profile(take, tmp_path):
    with pytest.raises(IndexError):
        take([1.0, 2.0], range(1, 4), steps=5)
    assert steps_in(trace_of(tmp_path))[0] == 1
    assert_closed(tmp_path)


def test_the_loop_and_the_reduction_carry_their_scopes(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    tiny = ("--d_model=16", "--n_layer=1", "--n_head=2", "--seq_len=16", "--steps=3")
    batch = ("--global_batch=16", "--microbatches=2", f"--data={text}")
    workdir = tmp_path / "a run"
    train.train(parse(*tiny, *batch, f"--workdir={workdir}", "--profile_steps=1:3"))
    path = trace_of(workdir)
    assert steps_in(path) == [1, 2]
    # The trace's operations are those of the step, and its programs' text names their scopes.
    ran = {stats["hlo_module"] for _, stats in stats_of(path) if "hlo_module" in stats}
    assert ran == {"jit_step"}
    assert all(scope in path.read_bytes() for scope in SCOPES)
    assert {p.name for p in workdir.iterdir()} == {"metrics.jsonl", "run.json", "profile"}
    assert (
        f"\nprofile of steps 1 to 2: {workdir}/profile; to see it: "
        f"pip install xprof && xprof --logdir='{workdir}/profile'\n"
    ) in capsys.readouterr().out


def test_hosts_share_a_session_and_processes_of_one_host_do_not():
    def session(*hosts):
        return train_loop.Profile("there", range(10, 15), hosts)

    assert session("a").session == session("a", "b").session == "steps_10_15"
    assert session("a", "a").session == session("a", "b", "a").session == "steps_10_15_process_0"
    assert "there, on each host; " in session("a", "b").told()
    assert "on each host" not in session("a", "a").told()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--profile_steps=15:10"], r"profile_steps=15:10.* with start < stop"),
        (["--profile_steps=10:10"], r"profile_steps=10:10.* with start < stop"),
        (["--profile_steps=10"], r"'10' is not start:stop .*; write for example 10:15\."),
        (["--profile_steps=-1:3"], r"'-1:3' is not start:stop"),
        (
            ["--profile_steps=4:7", "--steps=6"],
            r"profile_steps=4:7, .*: step 6 is not taken: .* from 0, and --steps=6 end with 5\.",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_steps_that_are_not_taken_are_refused_in_one_line(args, message):
    with pytest.raises(SystemExit, match=message) as exit_:
        parse(*args)
    assert "\n" not in exit_.value.code


def test_the_last_steps_may_be_profiled():
    assert train_flags.parse_steps(parse("--profile_steps=4:6", "--steps=6").profile_steps) == (
        range(4, 6)
    )
