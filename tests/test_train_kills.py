"""A training program that is killed, or asked to stop, goes on as if nothing had been."""

import re

import helpers
import kills
import pytest


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_what_another_does(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", helpers.XLA_FLAGS)
    # All starts run one program: compiled once.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    printed = kills.compare(tmp_path, [*kills.KILLS, *kills.ASKS], seed=0)
    for name, text in zip(kills.ASKS, printed[-2:], strict=True):
        line = text.splitlines()[-1]
        at = (
            rf"train: {name} at step \d+(, call [123] of 4)? of 48; saved: the same command goes on"
        )
        assert re.fullmatch(rf"{at}\.", line), text
