"""The tensor-parallel comparison as a real command."""

import os
import re
import subprocess
import sys

from comparison import TINY


def command(*args):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-m", "absl_apps.tensor_parallel", *args],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def test_the_command():
    result = command(*TINY, "--models=haiku", "--meshes=dp=4,mp=2")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "dp=4,mp=2 haiku\n" in result.stdout
    assert "dp=4,mp=2: of 12 losses and gradients none differ" in result.stdout


def test_the_command_fails_where_a_gradient_is_wrong():
    args = ("--models=haiku", "--break_rule=plain_psum", "--meshes=dp=1,mp=2")
    result = command(*TINY, *args)
    assert result.returncode == 1
    line = "tensor_parallel: dp=1,mp=2 haiku: differs by more than 2e-05: embedding/table, "
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1


def test_the_command_s_mistakes_are_one_line():
    result = command(*TINY, "--meshes=dp=2")
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"tensor_parallel: --meshes=dp=2: needed [^\n]*\n", result.stderr)
