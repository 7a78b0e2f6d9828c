"""Batches made ahead in threads, of a program that may end at any time."""

import contextlib
import logging.handlers
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from absl import logging as absl_logging
from token_data import numbered, positions

from absl_apps import batches


@pytest.fixture
def corpus(tmp_path):
    return numbered(tmp_path)


def test_batches_made_ahead_are_the_batches(corpus):
    dataset = batches.training(batches.Sequences(corpus, 10), 0, 8, np.arange(8))
    for start in (0, 5, 10**9):
        with contextlib.closing(batches.iterate(dataset, start)) as ahead:
            for call in range(start, start + 30):
                element, expected = next(ahead), dataset[call]
                for name in ("tokens", "mask"):
                    np.testing.assert_array_equal(element[name], expected[name])


def test_an_evaluation_ends(corpus):
    dataset = batches.evaluation(batches.Sequences(corpus, 10), 8, np.arange(8))
    assert len(list(batches.iterate(dataset))) == 13
    assert len(list(batches.iterate(dataset, 12))) == 1
    assert list(batches.iterate(dataset, 13)) == []
    for start in (-1, 14):
        with pytest.raises(ValueError, match=f"iterate: element {start} of 13"):
            batches.iterate(dataset, start)


class Failing(batches.Sequences):
    """Slow, and broken at one index."""

    made = 0
    broken = -1

    def __getitem__(self, index):
        time.sleep(0.05)
        if index == self.broken:
            raise OSError("the disk is gone")
        self.made += 1
        return super().__getitem__(index)


def prefetching():
    return {t for t in threading.enumerate() if t.name.startswith("grain-prefetch")}


def check_ended(ahead, own, sequences, before):
    """Asserts that the threads ended, with at most the one sequence that each was at."""
    assert own
    for thread in own:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in own)
    assert sequences.made <= before + len(own) + 1 < before + batches._AHEAD
    assert list(ahead) == []


def test_an_error_in_a_thread_reaches_the_caller_and_ends_all(corpus):
    sequences, others = Failing(corpus, 10), prefetching()
    sequences.broken = 2
    ahead = batches.iterate(batches.evaluation(sequences, 1, np.arange(1)))
    assert [positions(next(ahead)) for _ in range(2)] == [[0], [1]]
    own = prefetching() - others
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    check_ended(ahead, own, sequences, sequences.made)


def test_closing_ends_the_threads_without_the_batches_that_wait(corpus):
    sequences, others = Failing(corpus, 10), prefetching()
    ahead = batches.iterate(batches.training(sequences, 0, 1, np.arange(1)))
    next(ahead)
    own, before = prefetching() - others, sequences.made
    ahead.close()
    check_ended(ahead, own, sequences, before)


######################################### In a program ###########################################

PROGRAM = """
import sys, time
import numpy as np
from absl_apps import batches, corpus
assert "grain" not in sys.modules, "--help would take longer"

class Slow(batches.Sequences):
    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)

data = corpus.open_corpus(sys.argv[2:], max_bytes=None, vocab_size=None, document_end=None)
ahead = batches.iterate(batches.training(Slow(data, 10), 0, 2, np.arange(2)))
print(next(ahead)["tokens"].shape, flush=True)
how = sys.argv[1]
if how == "raise":
    raise KeyboardInterrupt
if how == "exit":
    sys.exit(3)
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exit", 3), ("raise", -2)], ids=str)
def test_a_program_ends_while_batches_are_made(tmp_path, how, code):
    (tmp_path / "a.txt").write_text("some text " * 100)
    command = [sys.executable, "-W", "error", "-c", PROGRAM, how, str(tmp_path / "a.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "(2, 11)\n", done.stderr
    assert done.returncode == code
    # import jax itself remarks on a CUDA plugin without a GPU.
    said = [s for s in done.stderr.splitlines() if not s.startswith(("WARNING: All log", "I0000"))]
    if how == "raise":
        assert said[-1] == "KeyboardInterrupt"
        assert sum("Traceback" in line for line in said) == 1
    else:
        assert said == []


def test_grain_warns_of_nothing_that_is_no_use(tmp_path, monkeypatch):
    """A stand-in that says what Grain says beside jaxlib 0.10.0, and more."""
    profiling = "Grain multiprocess worker profiling requires jaxlib extension version 448"
    (tmp_path / "grain.py").write_text(
        f"from absl import logging\nlogging.warning({profiling!r})\nlogging.warning('other')\n"
    )
    batches._grain()
    monkeypatch.delitem(sys.modules, "grain")
    monkeypatch.syspath_prepend(tmp_path)
    heard = logging.handlers.BufferingHandler(9)
    logger = absl_logging.get_absl_logger()
    logger.addHandler(heard)
    try:
        assert batches._grain().__file__ == str(tmp_path / "grain.py")
        absl_logging.warning(profiling)  # none of ours
    finally:
        logger.removeHandler(heard)
    assert [record.getMessage() for record in heard.buffer] == ["other", profiling]
