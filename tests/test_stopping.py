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


def test_the_second_ctrl_c_ends_the_process_as_always():
    with stopping.Signals() as signals:
        signals.heeded()
        signal.raise_signal(signal.SIGINT)
        assert signals.asked(1) == "SIGINT"
        for _ in range(2):  # and any other
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_sigterm_is_patient():
    """A scheduler may send it again, and ctrl-C after it is the first of its kind."""
    with stopping.Signals() as signals:
        signals.heeded()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert signals.asked(1) == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", BOTH)
def test_before_there_is_anything_to_save_a_signal_ends_at_once(number):
    with stopping.Signals(), pytest.raises(stopping.Stopped) as stopped:
        signal.raise_signal(number)
    assert not isinstance(stopped.value, Exception)  # no handler of errors is to stop it
    assert stopped.value.signal == number.name


def test_sigterm_and_ctrl_c_before_the_first_step():
    with stopping.Signals():
        for number in BOTH:
            with pytest.raises(stopping.Stopped, match=number.name):
                signal.raise_signal(number)


@pytest.mark.parametrize("error", [None, ValueError, stopping.Stopped("SIGTERM")])
def test_handlers_are_again_what_they_were(handlers, error):
    signal.signal(signal.SIGTERM, mine := lambda *_: None)
    try:
        with stopping.Signals():
            assert signal.getsignal(signal.SIGTERM) is not mine
            assert signal.getsignal(signal.SIGINT) is not handlers[0]
            if error is not None:
                raise error
    except (ValueError, stopping.Stopped):
        assert error is not None
    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.getsignal(signal.SIGINT) is handlers[0]


def test_how_a_program_ends_that_was_stopped():
    assert stopping.exit_code("SIGTERM") == 0  # the scheduler asked, and all is saved
    assert stopping.exit_code("SIGINT") == 130  # as shells know it
