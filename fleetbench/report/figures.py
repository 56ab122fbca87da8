"""Figures of a report. Each function takes data and returns a matplotlib ``Figure``; none shows or stores it.

``pyplot`` stays out: it keeps figures in a global list and asks for a display.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fleetbench.report.model import SPLIT, StepsView
from tuner.recommendation import Arm
from tuner.simulated.sizes import Sizes

SIMULATED = "#9fb8d0"
REAL = "#1f4e79"
MONEY = "#2f8f5b"
_PARTS = ("#1f4e79", "#e0a030", "#c44e35", "#5b9a68", "#b5b5b5")
"""One colour for each of ``SPLIT``; told apart by lightness too."""
_WIDTH_INCHES = 8.0
_STYLE: Any = {"font.size": 10, "svg.hashsalt": "fleetbench", "svg.fonttype": "path", "axes.titlesize": 11}


def simulated_against_real(arms: Sequence[Arm]) -> Figure:
    """Mean step time of every arm in ms: what the simulator said, and what was measured, with the legs' range."""
    figure, axes = _bars_figure(2 * len(arms))
    at = np.arange(len(arms), dtype=float)
    real = np.array([np.nan if arm.real_s is None else arm.real_s for arm in arms]) * 1e3
    low = np.array([min(arm.measured_s, default=np.nan) for arm in arms]) * 1e3
    high = np.array([max(arm.measured_s, default=np.nan) for arm in arms]) * 1e3
    simulated = np.array([arm.simulated_s for arm in arms]) * 1e3
    axes.barh(at - 0.2, simulated, 0.36, color=SIMULATED, label="simulated")
    axes.barh(at + 0.2, real, 0.36, color=REAL, label="real")
    known = ~np.isnan(real)
    spread = np.vstack([real[known] - low[known], high[known] - real[known]]).clip(min=0)
    axes.errorbar(
        real[known], at[known] + 0.2, xerr=spread, fmt="none", ecolor="#e0a030", elinewidth=1.4, capsize=3, label="range of the legs"
    )
    ends = np.nanmax(np.vstack([simulated, real, high]), axis=0)
    for place, (arm, end) in enumerate(zip(arms, ends, strict=True)):
        if arm.error is not None:
            axes.annotate(
                f"{100 * arm.error:+.1f} %",
                (end, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color="#555555",
            )
    axes.set_xlim(0, float(np.nanmax(ends)) * 1.14)
    _name_bars(axes, [arm.name for arm in arms])
    axes.set_xlabel("mean step time (ms); in grey: error of the simulated one")
    _legend(axes, 3)
    return figure


def time_split(views: Sequence[StepsView]) -> Figure:
    """A step's mean time in ms, one stacked bar a view: ``SPLIT``'s parts from left to right."""
    figure, axes = _bars_figure(len(views))
    at = np.arange(len(views), dtype=float)
    left = np.zeros(len(views))
    for part, (name, colour) in enumerate(zip(SPLIT, _PARTS, strict=True)):
        widths = np.array([view.split_s[part] for view in views]) * 1e3
        axes.barh(at, widths, 0.62, left=left, color=colour, label=name)
        left = left + widths
    axes.set_xlim(0, float(left.max()) * 1.04)
    _name_bars(axes, [view.label for view in views])
    axes.set_xlabel("mean time of a step and trainer (ms)")
    _legend(axes, len(SPLIT))
    return figure


def sizes(found: Sizes) -> Figure:
    """Samples a second over trainers, beside the first size's for each trainer; below, efficiency and money."""
    trainers = [size.trainers for size in found.sizes]
    rates = np.array([size.samples_per_s for size in found.sizes])
    priced = [size.cost for size in found.sizes if size.cost is not None]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, 6.0), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
    ideal = rates[0] / trainers[0] * np.array(trainers)
    above.loglog(trainers, ideal, "--", color="#b5b5b5", label="as many a trainer as at the first size")
    defaults = rates * [size.step_s / size.default_s for size in found.sizes]
    above.loglog(trainers, defaults, color=SIMULATED, marker="o", markersize=4, label="the experiment's own strategy")
    above.loglog(trainers, rates, color=REAL, marker="o", markersize=4, label="best strategy")
    above.set_ylabel("samples per second")
    above.set_title(f"{found.name}: SIMULATED, {found.compute}")
    above.legend(frameon=False, fontsize=9)
    below.semilogx(trainers, [100 * size.efficiency for size in found.sizes], color=REAL, marker="o", markersize=4)
    below.set_ylim(0, 105)
    below.set_ylabel("efficiency (%)", color=REAL)
    below.set_xlabel("trainers")
    below.set_xticks(trainers, [f"{number:,}" for number in trainers])
    below.minorticks_off()
    if priced:
        money = below.twinx()
        money.plot(trainers, priced, color=MONEY, marker="s", markersize=4)
        money.set_ylim(0, 1.05 * max(priced))
        money.set_ylabel(f"cost of {found.priced_samples:.3g} samples", color=MONEY)
    for axes in (above, below):
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure


def data_uri(figure: Figure) -> str:
    """The figure as an SVG in a ``data:`` URI; equal figures give equal text."""
    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG."""
    with mpl.rc_context(_STYLE):
        figure.savefig(path, dpi=120)


def _bars_figure(num_bars: int) -> tuple[Figure, Axes]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, 1.1 + 0.34 * max(num_bars, 1)), layout="constrained")
        axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    return figure, axes


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        fontsize=9,
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.4,
    )
