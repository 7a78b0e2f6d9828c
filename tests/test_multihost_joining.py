"""What one process of several says before it joins the others, and of flags that make no sense."""

import re
import socket
import subprocess
import sys

import pytest
from processes import ROOT, SMALL, environment, parse

from absl_apps import cluster


def command(*args, **environment_):
    result = subprocess.run(
        [sys.executable, "-m", "absl_apps.train", *SMALL, *args],
        capture_output=True,
        text=True,
        env=environment(**environment_),
        cwd=ROOT,
        timeout=200,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    return [x for x in result.stderr.splitlines() if not re.match(r"I\d{4} ", x)]


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_whose_others_do_not_come_says_so(process):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    said = command(
        "--multihost",
        f"--coordinator_address={address}",
        "--num_processes=2",
        f"--process_id={process}",
        "--initialization_timeout=1",
    )
    assert said == [
        f"train: --multihost: not all 2 processes have joined at {address} in "
        "--initialization_timeout=1 s; start all of them, with one address that all can reach."
    ]


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        address = f"--coordinator_address=127.0.0.1:{port}"
        (line,) = command("--multihost", address, "--num_processes=2", "--process_id=0")
    assert re.match(r"train: --multihost: .*[Aa]ddress already in use", line)


def test_without_a_cluster_the_flags_are_named():
    (line,) = command("--multihost")
    assert re.match(
        r"train: --multihost: there is no cluster to ask here .*Slurm or Open MPI\); give "
        r"--coordinator_address=HOST:PORT --num_processes=N --process_id=I\.",
        line,
    )


def test_a_cluster_says_what_the_flags_do_not():
    """As Slurm would; the second of its two processes does not come."""
    (line,) = command(
        "--multihost",
        "--initialization_timeout=1",
        SLURM_JOB_ID="77",
        SLURM_STEP_NODELIST="localhost",
        SLURM_NTASKS="2",
        SLURM_PROCID="1",
        SLURM_LOCALID="0",
    )
    assert "not all its processes have joined in --initialization_timeout=1 s" in line


MANY = ("--multihost", "--coordinator_address=a:1")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--num_processes=2", "--process_id=0"],
            r"--num_processes=2 --process_id=0: .* add --m",
        ),
        (["--coordinator_address=a:1"], r"--coordinator_address=a:1: says how .* add --multihost"),
        ([*MANY, "--process_id=1"], r"--process_id=1: --num_processes is missing; give both"),
        ([*MANY, "--num_processes=2"], r"--num_processes=2: --process_id is missing; give both"),
        (
            [*MANY, "--num_processes=2", "--process_id=2"],
            r"--process_id=2: the 2 processes count from 0 to 1\.",
        ),
        (["--multihost", "--coordinator_address=a"], r"is not HOST:PORT; write for example"),
        (["--multihost", "--coordinator_address=a:0"], r"is not HOST:PORT"),
        (["--multihost", "--coordinator_address=a:65536"], r"is not HOST:PORT"),
        ([*MANY, "--process_id=-1", "--num_processes=2"], r"--process_id=-1"),
        (["--heartbeat_timeout=1"], r"--heartbeat_timeout=1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_flags_that_make_no_sense_are_one_line(args, message):
    with pytest.raises(SystemExit, match=message) as exit_:
        parse(*args)
    assert "\n" not in exit_.value.code


def test_flags_that_a_cluster_completes_are_taken():
    parse("--multihost")
    parse(*MANY)
    parse("--multihost", "--num_processes=2", "--process_id=1")
    parse(*MANY, "--num_processes=1", "--process_id=0")


def test_one_process_has_no_one_to_ask():
    assert cluster.exchange("said") == ["said"]
    assert cluster.agree({"a": 1, "_b": 2}) == [{"a": 1, "_b": 2}]
    with pytest.raises(ValueError, match=r"^no such thing$"), cluster.failing_together():
        raise ValueError("no such thing")
    with pytest.raises(ZeroDivisionError), cluster.failing_together():
        raise ZeroDivisionError
