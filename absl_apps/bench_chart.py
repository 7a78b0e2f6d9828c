"""What absl_apps.bench measured, as one picture."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from absl_apps import whole_writes
from absl_apps.bench_problem import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of Okabe and Ito: ours stands out, also in grey; the others' lines are told apart by markers too.
_OURS, _OTHER = "#D55E00", "#0072B2"
_COLOURS = "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999"
_MARKERS = "osv^D*P"

Sweep = Mapping[int, Mapping[str, Mapping[str, Any]]]  # k: name: what --json holds


def draw(contenders: Mapping[str, Mapping[str, Any]], sweep: Sweep, title: str, path: str) -> None:
    """Draw bars of times with their spread, and lines of time and memory against k, as PNG.

    Args:
      contenders: by name, what --json holds of them; times may be None: nothing ran.
      sweep: the same for other numbers of microbatches; empty: no lines.
      title: of the problem.
      path: of the picture.

    Raises:
      OSError: of the disk; a picture that was there is as it was.
    """
    picture = io.BytesIO()
    figure(contenders, sweep, title).savefig(picture, format="png")
    whole_writes.replace(path, picture.getvalue())


def figure(contenders: Mapping[str, Mapping[str, Any]], sweep: Sweep, title: str) -> Figure:
    """Return what `draw` draws."""
    from matplotlib import ticker
    from matplotlib.figure import Figure  # its own canvas: no display, and no state of pyplot's

    drawn = Figure(figsize=(15 if sweep else 8, 4.8), dpi=120, layout="constrained")
    drawn.suptitle(title)
    panels = drawn.subplots(1, 3 if sweep else 1, squeeze=False)[0]
    _bars(panels[0], contenders)
    if sweep:
        _lines(panels[1], sweep, "median_seconds", "time of a step, s")
        _lines(panels[2], sweep, "temp_gradient_trees", "temporary memory, gradient trees")
        panels[1].set_yscale("log")
        panels[1].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panels[1].yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        panels[1].minorticks_off()
        panels[2].set_ylim(bottom=0)
        drawn.legend(*panels[2].get_legend_handles_labels(), loc="outside right upper")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _bars(axes: Axes, contenders: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws median times, from the fastest round to the slowest."""
    timed = {name: row for name, row in contenders.items() if row["median_seconds"] is not None}
    if not timed:
        axes.text(0.5, 0.5, "nothing ran: not measured", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    names = list(timed)
    medians = [timed[name]["median_seconds"] for name in names]
    below = [timed[name]["median_seconds"] - timed[name]["min_seconds"] for name in names]
    above = [timed[name]["max_seconds"] - timed[name]["median_seconds"] for name in names]
    colours = [_OURS if name == OURS else _OTHER for name in names]
    axes.barh(names, medians, xerr=[below, above], color=colours, ecolor="#444444", capsize=3)
    for name, median, up in zip(names, medians, above, strict=True):
        axes.annotate(
            f"{timed[name]['ratio']:.2f}",
            (median + up, name),
            textcoords="offset points",
            xytext=(6, 0),
            va="center",
        )
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"time, s: median, fastest and slowest round; ratio to {OURS}")


def _lines(axes: Axes, sweep: Sweep, key: str, label: str) -> None:
    """Draws one number of each contender against k."""
    others = iter(zip(_COLOURS, _MARKERS, strict=True))
    for name in next(iter(sweep.values())):
        points = {k: rows[name][key] for k, rows in sweep.items() if rows[name][key] is not None}
        colour, marker = (_OURS, "o") if name == OURS else next(others, ("#999999", "x"))
        width = 2.5 if name == OURS else 1.3
        x, y = list(points), list(points.values())
        axes.plot(x, y, marker=marker, color=colour, lw=width, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sweep), [f"{k:,}" for k in sweep])
    axes.minorticks_off()
    axes.set_xlabel("microbatches a step, of one batch")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
