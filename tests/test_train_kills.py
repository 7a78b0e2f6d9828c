"""A training program that is killed goes on as if nothing had been."""

import kills
import pytest


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_what_another_does(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    kills.compare(tmp_path, kills=3, seed=0)
