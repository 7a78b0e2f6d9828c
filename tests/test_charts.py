"""The chart of a run: what is drawn, where the axis ends, and what is said of it."""

import itertools
import math
import struct
import time

import numpy as np
import pytest

from absl_apps import charts

STEEP = 2 + 3.5 * np.exp(-np.arange(150) / 25)


def lines_of(losses, evals=None):
    return [
        {"step": step, "loss": loss} | ({"eval_loss": evals[step]} if step in (evals or {}) else {})
        for step, loss in enumerate(losses)
    ]


def drawn(lines, **options):
    """Returns the axes of a chart, and its lines by the first words of their labels."""
    (axes,) = charts.figure(lines, **options).axes
    return axes, {line.get_label().partition(",")[0]: line for line in axes.lines}


def labels(axes):
    return [line.get_label() for line in axes.lines]


def size(path):
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_steps_their_mean_evals_and_entropy(tmp_path):
    lines = lines_of(STEEP, {49: 2.6, 99: 2.3, 149: 2.25})
    axes, _ = drawn(lines, unigram_entropy=3.15)
    each, mean, evals, entropy = axes.lines
    assert labels(axes) == [
        "training loss, each step",
        "training loss, running mean of 7",
        "eval loss",
        "unigram entropy, 3.150",
    ]
    np.testing.assert_array_equal(each.get_xydata(), np.c_[np.arange(150), STEEP])
    smooth = mean.get_ydata()
    # As many on both sides: the first is itself, the one after it a mean of three.
    want = [STEEP[0], STEEP[:3].mean(), STEEP[97:104].mean(), STEEP[-4:].mean()]
    np.testing.assert_allclose(smooth[[0, 1, 100, -1]], want, rtol=1e-12)
    np.testing.assert_array_equal(evals.get_xydata(), [(49, 2.6), (99, 2.3), (149, 2.25)])
    assert list(entropy.get_ydata()) == [3.15, 3.15]
    assert axes.get_title() == (
        f"training loss {STEEP[-10:].mean():.3f}, mean of the last 10 steps; "
        "eval loss 2.250 at step 149"
    )
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss, nats a token")
    assert axes.get_yscale() == "linear"
    low, high = axes.get_ylim()
    assert 1.8 < low < STEEP.min()
    assert STEEP.max() < high < 5.8
    assert each.get_alpha() < 1
    assert mean.get_linewidth() > each.get_linewidth()


@pytest.mark.parametrize(
    ("losses", "title"),
    [
        ([], "no finite training loss"),
        ([None] * 5, "no finite training loss"),
        ([math.nan, math.inf], "no finite training loss"),
        ([5.5], "training loss 5.500"),
        ([5.5, 4.5], "training loss 5.000, mean of the last 2 steps"),
        ([2.0] * 50, "training loss 2.000, mean of the last 10 steps"),
        ([0.0] * 50, "training loss 0.000, mean of the last 10 steps"),
    ],
    ids=["none", "all null", "none finite", "one", "two", "flat", "zero"],
)
@pytest.mark.parametrize("entropy", [None, 3.15])
def test_few_or_no_points(tmp_path, losses, title, entropy):
    axes, by_label = drawn(lines_of(losses), unigram_entropy=entropy)
    assert axes.get_title() == title
    limits = np.array([axes.get_xlim(), axes.get_ylim()])
    assert np.all(np.isfinite(limits))
    assert np.all(limits[:, 0] < limits[:, 1])
    if losses and len(losses) < 3 and losses[0] == 5.5:
        assert by_label["training loss"].get_marker() == "."  # a line of one point is not seen
    charts.draw(lines_of(losses), str(tmp_path / "loss.png"), entropy)
    assert size(tmp_path / "loss.png") == (1170, 715)
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_skipped_steps_are_marked(tmp_path):
    losses = [*STEEP]
    losses[40], losses[149] = None, None
    lines = lines_of(losses)
    lines[60]["skipped"] = True  # its gradient was not finite, its loss was
    _, by_label = drawn(lines)
    marks = by_label["3 steps skipped"]
    np.testing.assert_array_equal(marks.get_xdata(), [40, 60, 149])
    assert set(marks.get_ydata()) == {0.0}  # of the axes' height
    assert by_label["training loss"].get_xdata().size == 148
    assert "1 step skipped" in labels(drawn(lines_of([1.0, None]))[0])
    assert "skipped" not in "".join(labels(drawn(lines_of(STEEP))[0]))


@pytest.mark.parametrize("count", [5, 150, 100_000])
def test_a_rare_far_loss_is_marked_above_the_axis_and_not_in_the_mean(count):
    losses = np.resize(STEEP, count)
    losses[2] = 9e3
    axes, by_label = drawn(lines_of(losses))
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[1] < 6
    marks = by_label["1 step above the axis"]
    assert marks.get_label() == "1 step above the axis, up to 9,000"
    assert list(marks.get_xdata()) == [2]
    for line in axes.lines:
        assert line.get_ydata().max() < 6  # the running mean's too
    near, _ = drawn(lines_of(np.where(losses > 6, 8.0, losses)))
    assert near.get_ylim()[1] > 8
    assert not any("above" in label for label in labels(near))


def test_an_eval_loss_that_is_far_is_marked_as_such():
    evals = dict.fromkeys(range(0, 150, 10), 2.5) | {149: 700.0}
    axes, by_label = drawn(lines_of(STEEP, evals))
    assert "1 step above the axis" not in by_label
    assert "eval, 1 step above the axis" in "\n".join(labels(axes))
    assert by_label["eval loss"].get_ydata().max() == 2.5


@pytest.mark.parametrize(
    ("losses", "scale", "top"),
    [
        (300 * np.exp(-np.arange(400) / 50) + 0.01, "log", 300),
        (np.exp(np.linspace(0.7, 20, 500)), "log", np.exp(20)),  # it diverges: all is shown
        (np.linspace(-1, 300, 400), "linear", 300),
        (np.linspace(1, 19, 400), "linear", 19),
    ],
    ids=["wide", "diverging", "negative", "narrow"],
)
def test_a_wide_range_is_logarithmic(losses, scale, top):
    axes, _ = drawn(lines_of(losses))
    assert axes.get_yscale() == scale
    assert axes.get_ylim()[1] > top
    assert not any("above" in label for label in labels(axes))


def test_a_hundred_thousand_steps_are_fast_and_small(tmp_path):
    rng = np.random.default_rng(0)
    losses = 2.4 + 8 * np.exp(-np.arange(100_000) / 3000) + 0.25 * rng.normal(size=100_000)
    losses[60_037], losses[61_043] = 12.5, 0.5
    lines = lines_of(losses.tolist(), dict.fromkeys(range(999, 100000, 1000), 2.5))
    axes, _ = drawn(lines)
    each = axes.lines[0]
    assert each.get_label() == "training loss, each step"
    assert each.get_xdata().size < 2500
    assert each.get_ydata().max() == losses.max()
    assert each.get_ydata().min() == losses.min()
    started = time.process_time()  # of this process alone: other tests run beside it
    charts.draw(lines, str(tmp_path / "loss.png"), 3.15)
    assert time.process_time() - started < 2
    assert 20_000 < (tmp_path / "loss.png").stat().st_size < 300_000


def test_words_and_marks_do_not_overlap():
    losses = [None if step % 9 == 0 else loss for step, loss in enumerate(STEEP)]
    losses[70] = 9e3
    figure = charts.figure(lines_of(losses, {50: 2.5, 149: 2.2}), unigram_entropy=3.15)
    figure.draw_without_rendering()
    (axes,), (legend,) = figure.axes, figure.legends
    assert len(legend.get_texts()) == 6
    box = legend.get_window_extent()
    assert box.y1 < axes.xaxis.label.get_window_extent().y0
    assert box.x0 > 0
    assert box.x1 < figure.bbox.x1
    title = axes.title.get_window_extent()
    assert title.y0 > axes.bbox.y1 + 4  # half a mark above the axis
    assert title.y1 < figure.bbox.y1
    assert title.x0 > 0
    ticks = [tick.label1.get_window_extent() for tick in axes.xaxis.get_major_ticks()]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(ticks))


def test_an_old_picture_is_replaced_in_one_move(tmp_path):
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")
    (tmp_path / "loss.png.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        charts.draw(lines_of(STEEP), str(path))
    assert path.read_bytes() == b"old"
    charts.draw(lines_of(STEEP), str(path))
    assert size(path) == (1170, 715)
