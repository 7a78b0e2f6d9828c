"""SIGTERM and ctrl-C in one process: what is heard, when it is heeded, and what is left after."""

import signal

import pytest

from absl_apps import stopping

BOTH = signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def handlers():
    """Whatever a test does, the handlers are again those from before it."""
    before = [signal.getsignal(number) for number in BOTH]
    yield before
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)


def test_nothing_is_heard_where_nothing_was_sent():
    with stopping.Signals() as signals:
        signals.heeded()
        assert [signals.asked(calls) for calls in (1, 2, 3)] == [None] * 3


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_stops_no_call_and_is_told_after_it(number):
    with stopping.Signals() as signals:
        signals.heeded()
        assert signals.asked(1) is None
        signal.raise_signal(number)  # where nothing is raised
        assert [signals.asked(2), signals.asked(3)] == [number.name] * 2


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ending(monkeypatch):
    def end(code):
        raise Ended(code)

    monkeypatch.setattr(stopping.os, "_exit", end)


def test_the_second_ctrl_c_ends_the_process_at_once(ending, capfd):
    with stopping.Signals() as signals:
        signals.heeded()
        signal.raise_signal(signal.SIGINT)
        assert signals.asked(1) == "SIGINT"
        for _ in range(2):  # and any other
            with pytest.raises(Ended, match="130"):
                signal.raise_signal(signal.SIGINT)
    line = "train: SIGINT again: stopped at once; what was saved is kept.\n"
    assert capfd.readouterr().out == 2 * line


def test_sigterm_is_patient(ending):
    """A scheduler may send it again, and ctrl-C after it is the first of its kind."""
    with stopping.Signals() as signals:
        signals.heeded()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert signals.asked(1) == "SIGINT"
        with pytest.raises(Ended, match="130"):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, "130"), (signal.SIGTERM, "0")])
def test_before_there_is_anything_to_save_a_signal_ends_at_once(ending, capfd, number, code):
    with stopping.Signals(), pytest.raises(Ended, match=code):
        signal.raise_signal(number)
    line = f"train: {number.name} before the first step of this start; nothing new to save.\n"
    assert capfd.readouterr().out == line


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_handlers_are_again_what_they_were(handlers, error):
    signal.signal(signal.SIGTERM, mine := lambda *_: None)
    try:
        with stopping.Signals():
            assert signal.getsignal(signal.SIGTERM) is not mine
            assert signal.getsignal(signal.SIGINT) is not handlers[0]
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        assert error is not None
    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.getsignal(signal.SIGINT) is handlers[0]


def test_how_a_program_ends_that_was_stopped():
    assert stopping.exit_code("SIGTERM") == 0  # the scheduler asked, and all is saved
    assert stopping.exit_code("SIGINT") == 130  # as shells know it
