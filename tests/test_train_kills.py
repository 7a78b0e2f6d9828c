"""A training program that is killed, or asked to stop, goes on as if nothing had been."""

import re

import kills
import pytest


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_what_another_does(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    printed = kills.compare(tmp_path, [*kills.KILLS, *kills.ASKS], seed=0)
    for name, text in zip(kills.ASKS, printed[-2:], strict=True):
        line = text.splitlines()[-1]
        at = (
            rf"train: {name} at step \d+(, call [123] of 4)? of 62; saved: the same command goes on"
        )
        assert re.fullmatch(rf"{at}\.", line), text
