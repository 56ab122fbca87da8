"""Figures of a report. Each function takes data and returns a matplotlib ``Figure``; none shows or stores it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
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
    table = pd.DataFrame({"simulated": [arm.simulated_s for arm in arms], "real": [arm.real_s for arm in arms]}, dtype=float) * 1e3
    legs = np.array([(min(arm.measured_s, default=np.nan), max(arm.measured_s, default=np.nan)) for arm in arms]).T * 1e3
    real = table["real"].to_numpy()
    spread = np.nan_to_num([real - legs[0], legs[1] - real]).clip(min=0)
    table.index = pd.Index([arm.name if arm.error is None else f"{arm.name} ({100 * arm.error:+.1f} %)" for arm in arms])
    label = "mean step time (ms), with the range of the real legs; in brackets: error of the simulated one"
    return _bars(table, label, xerr={"real": spread}, color=[SIMULATED, REAL])


def time_split(views: Sequence[StepsView]) -> Figure:
    """A step's mean time in ms, one stacked bar a view: ``SPLIT``'s parts from left to right."""
    table = pd.DataFrame([view.split_s for view in views], [view.label for view in views], SPLIT) * 1e3
    return _bars(table, "mean time of a step and trainer (ms)", stacked=True, color=_PARTS)


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


def _bars(table: pd.DataFrame, label: str, **options: Any) -> Figure:
    """Horizontal bars, the table's first row on top."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, 1.1 + 0.34 * max(table.size if "xerr" in options else len(table), 1)), layout="constrained")
        axes = table.plot.barh(ax=figure.subplots(), width=0.7, xlabel=label, **options)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=table.shape[1], fontsize=9)
    return figure
