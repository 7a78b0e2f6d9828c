"""A run's loss, step by step, as one picture."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from absl_apps import whole_writes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of Okabe and Ito: told apart by colour-blind readers, and in grey.
TRAINING, EVAL, ENTROPY, SKIPPED = "#0072B2", "#D55E00", "#000000", "#CC79A7"

SMOOTHED = 25  # the running mean is over this part of the steps
FINAL_STEPS = 10  # the final loss is the mean over so many steps: a single step's is noisy
LOGARITHMIC = 20.0  # the ratio of losses from which their axis is logarithmic
RARE = 0.001  # the part of the losses, at least one, that may be off the axis ...
FAR = 1.5  # ... where they are so many times the others' range above these, and would squeeze them
FEW = 40  # so many points are seen one by one
COLUMNS = 1000  # of pixels, about: of many points in one, the least and the greatest are seen

Points = tuple[np.ndarray, np.ndarray]  # steps and values


def draw(
    lines: Sequence[Mapping[str, Any]], path: str, unigram_entropy: float | None = None
) -> None:
    """Draw the losses of a run, as PNG, in one move.

    Args:
      lines: of metrics.jsonl: `step`; `loss`, null where it was not finite; `skipped`, true where
        the update was; `eval_loss`, where it was measured.
      path: of the picture.
      unigram_entropy: nats a token, the loss of a model of token frequencies alone.

    Raises:
      OSError: of the disk; a picture that was there is as it was.
    """
    picture = io.BytesIO()
    figure(lines, unigram_entropy).savefig(picture, format="png")
    whole_writes.replace(path, picture.getvalue())


def figure(lines: Sequence[Mapping[str, Any]], unigram_entropy: float | None = None) -> Figure:
    """Return what `draw` draws."""
    from matplotlib.figure import Figure  # its own canvas: no display, and no state of pyplot's

    training, evaluated = _points(lines, "loss"), _points(lines, "eval_loss")
    drawn = Figure(figsize=(9, 5.5), dpi=130, layout="constrained")
    drawn.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    axes = drawn.add_subplot()
    others = [] if unigram_entropy is None else [unigram_entropy]
    top = _set_loss_axis(axes, np.concatenate([training[1], evaluated[1], others]))
    _set_step_axis(axes, lines)
    _draw_training(axes, *_where(training, training[1] <= top))
    if evaluated[0].size:
        look = {"color": EVAL, "linewidth": 1.5, "label": "eval loss"}
        look |= {"marker": "o", "markersize": 5} if evaluated[0].size <= FEW else {}
        axes.plot(*_thinned(*_where(evaluated, evaluated[1] <= top)), **look)
    if unigram_entropy is not None:
        label = f"unigram entropy, {unigram_entropy:.3f}"
        axes.axhline(unigram_entropy, color=ENTROPY, linewidth=1.2, linestyle="--", label=label)
    skipped = np.array([line["step"] for line in lines if _is_skipped(line)])
    if skipped.size:
        _mark(axes, skipped, "X", SKIPPED, 0.0, f"{_steps(skipped.size)} skipped")
    for name, (steps, values), colour in (("", training, TRAINING), ("eval, ", evaluated, EVAL)):
        above = values > top
        if above.any():
            label = f"{name}{_steps(int(above.sum()))} above the axis, up to {_short(values.max())}"
            _mark(axes, steps[above], "^", colour, 1.0, label)
    axes.set_title(_title(training, evaluated), fontsize=12)
    if axes.get_legend_handles_labels()[1]:
        # Below the axes, where no line can be.
        drawn.legend(loc="outside lower center", ncols=3, frameon=False)
    return drawn


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> Points:
    kept = [line for line in lines if _is_finite(line.get(name))]
    steps = np.array([line["step"] for line in kept], np.int64)
    return steps, np.array([line[name] for line in kept], np.float64)


def _where(points: Points, condition: np.ndarray) -> Points:
    return points[0][condition], points[1][condition]


def _is_skipped(line: Mapping[str, Any]) -> bool:
    return bool(line.get("skipped")) or ("loss" in line and not _is_finite(line["loss"]))


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


########################################## What is drawn #########################################


def _draw_training(axes: Axes, steps: np.ndarray, losses: np.ndarray) -> None:
    """Draws each step, and over them the running mean where there are enough of them."""
    if not steps.size:
        return
    mark = "." if steps.size <= FEW else ""
    half = steps.size // SMOOTHED // 2
    each = {"color": TRAINING, "marker": mark, "linewidth": 1.5, "label": "training loss"}
    if half:
        each |= {"alpha": 0.45, "linewidth": 0.9, "label": "training loss, each step"}
    axes.plot(*_thinned(steps, losses), **each)
    if half:
        label = f"training loss, running mean of {2 * half + 1:,}"
        smooth = _running_mean(losses, half)
        axes.plot(*_thinned(steps, smooth), color=TRAINING, linewidth=2, label=label)


def _running_mean(values: np.ndarray, half: int) -> np.ndarray:
    """Returns the mean of each value and of `half` on either side, fewer at the ends.

    As many on both sides at the start, where the loss is steep; at the end it is flat, and noisy.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(values.size)
    beside = np.minimum(at, half)
    first, end = at - beside, np.minimum(at + beside + 1, values.size)
    return (sums[end] - sums[first]) / (end - first)


def _thinned(x: np.ndarray, y: np.ndarray) -> Points:
    """Returns the points that can be told apart in a picture; the extremes are among them."""
    if x.size <= 2 * COLUMNS:
        return x, y
    edges = np.linspace(0, x.size, COLUMNS + 1).astype(int)
    kept = [0, x.size - 1]
    for first, end in itertools.pairwise(edges):
        kept += [first + y[first:end].argmin(), first + y[first:end].argmax()]
    kept = np.unique(kept)
    return x[kept], y[kept]


def _mark(axes: Axes, steps: np.ndarray, mark: str, colour: str, height: float, label: str) -> None:
    """Marks steps at the lower (0) or upper (1) edge of the axes."""
    low, high = axes.get_xlim()
    spots, first = np.unique(np.round(300 * (steps - low) / (high - low)), return_index=True)
    look = {"color": colour, "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.5}
    at_edge = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 3}
    heights = np.full(spots.size, height)
    axes.plot(steps[first], heights, mark, label=label, **look, **at_edge)


######################################### Axes and title #########################################


def _set_loss_axis(axes: Axes, values: np.ndarray) -> float:
    """Fits the axis to the values; returns the greatest on it."""
    from matplotlib import ticker

    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if not values.size:
        axes.set_yticks([])
        return np.inf
    top, logarithmic = _fitting(values)
    low = values.min()
    if logarithmic:
        axes.set_yscale("log")
        margin = (top / low) ** 0.05
        axes.set_ylim(low / margin, top * margin)
        subs = (1, 2, 5) if top / low < 1e4 else (1,)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        margin = 0.05 * (top - low) or 0.1 * abs(top) or 1.0
        axes.set_ylim(low - margin, top + margin)
        axes.ticklabel_format(axis="y", useOffset=False)
    return top


def _fitting(values: np.ndarray) -> tuple[float, bool]:
    """Returns the greatest value to show, and whether on a logarithmic axis."""
    ordered = np.sort(values)
    low, rare = ordered[0], max(1, int(RARE * values.size))
    common = ordered[-1 - rare] if values.size > 4 else ordered[-1]
    if low > 0 and common / low > LOGARITHMIC:
        return ordered[-1], True
    reach = common + FAR * max(common - low, 0.5 * abs(common))
    top = ordered[ordered <= reach][-1]
    return top, bool(low > 0 and top / low > LOGARITHMIC)


def _set_step_axis(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib import ticker

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(
        ticker.MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10))
    )
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    steps = [line["step"] for line in lines] or [0]
    first, last = min(steps), max(steps)
    margin = 0.02 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)


def _title(training: Points, evaluated: Points) -> str:
    if not training[0].size:
        return "no finite training loss"
    last = training[1][-FINAL_STEPS:]
    over = "" if last.size == 1 else f", mean of the last {last.size} steps"
    title = f"training loss {_short(last.mean())}{over}"
    if evaluated[0].size:
        title += f"; eval loss {_short(evaluated[1][-1])} at step {evaluated[0][-1]:,}"
    return title


def _short(loss: float) -> str:
    if 1000 <= abs(loss) < 1e6:
        return f"{loss:,.0f}"
    return f"{loss:.3f}" if loss == 0 or 0.1 <= abs(loss) < 1000 else f"{loss:.3g}"


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"
