"""--profile_steps: which steps, which scopes, which files, and what becomes of a run cut short."""

import json
import os
import pathlib
import subprocess
import sys
import warnings

import helpers
import jax
import profile_worker
import pytest
from absl import flags

from absl_apps import train_checks, train_flags, train_profile

ROOT = pathlib.Path(train_profile.__file__).parent.parent
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


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """The directory that tests/profile_worker.py left, and what its cases returned."""
    directory = tmp_path_factory.mktemp("profiles")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    chosen = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": helpers.XLA_FLAGS, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, profile_worker.__file__, str(directory)],
        env=environment | chosen,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return directory, json.loads((directory / "cases.json").read_text())


@pytest.mark.parametrize("case", ["first", "middle", "last"])
def test_the_profile_holds_the_steps_asked_for(taken, case):
    directory, returned = taken
    losses, (start, stop), _ = profile_worker.CASES[case]
    assert returned[case] == losses
    path = trace_of(directory / case)
    assert steps_in(path) == list(range(start, stop))
    assert path.parent.name == f"steps_{start}_{stop}"


def test_a_run_cut_short_leaves_its_profile(taken):
    directory, returned = taken
    assert "step 2 is not finite: its loss is nan" in returned["cut short"]
    assert steps_in(trace_of(directory / "cut short")) == [1, 2]


def test_a_step_that_fails_leaves_its_profile(taken):
    directory, returned = taken
    assert returned["failing"] == "list index out of range"
    assert steps_in(trace_of(directory / "failing"))[0] == 1


def test_the_loop_and_the_reduction_carry_their_scopes(taken):
    directory, _ = taken
    workdir = directory / "a run"
    path = trace_of(workdir)
    assert steps_in(path) == [1, 2]
    # The trace's operations are those of the step, and its programs' text names their scopes.
    ran = {stats["hlo_module"] for _, stats in stats_of(path) if "hlo_module" in stats}
    assert ran == {"jit_step"}
    assert all(scope in path.read_bytes() for scope in SCOPES)
    assert not any(scope in trace_of(directory / "last").read_bytes() for scope in SCOPES)
    assert (
        f"\nprofile of steps 1 to 2: {workdir}/profile; to see it: "
        f"pip install xprof && xprof --logdir='{workdir}/profile'\n"
    ) in (directory / "printed").read_text()


def test_hosts_share_a_session_and_processes_of_one_host_do_not():
    def session(*hosts):
        return train_profile.Profile("there", range(10, 15), hosts, written=True)

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
    assert train_checks.parse_steps(parse("--profile_steps=4:6", "--steps=6").profile_steps) == (
        range(4, 6)
    )


def test_a_run_that_went_on_after_the_steps_has_no_profile():
    profile = train_profile.Profile("there", range(10, 15), ["a"])
    assert profile.told() == (
        "\nno profile of steps 10 to 14: the first was taken before this start"
    )
