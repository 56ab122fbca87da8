"""The figure: predicted against measured on logarithmic axes, and residuals by strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from errors import Cell
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

STYLES = {
    "naive": ("compute + bytes/bandwidth", "x", "#b5b5b5"),
    "means": ("closed form, means", "+", "#e0a030"),
    "draws": ("closed form, draws", "s", "#5b9a68"),
    "sim": ("simulator", "o", "#1f4e79"),
}

TICKS_MS = (100, 150, 200, 300, 400, 600, 1000, 1500)


def draw(cells: Sequence[Cell], path: Path, *, is_of_regimes: bool = False) -> None:
    """Draw all cells; calibrated ones are hollow. A row is a strategy, of regimes a strategy of a regime."""
    figure = Figure(figsize=(12.0, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.25))
    _scatter(left, cells)
    _residuals(right, cells, is_of_regimes=is_of_regimes)
    figure.savefig(path, dpi=130)


def _scatter(axes: Axes, cells: Sequence[Cell]) -> None:
    real = np.array([1e3 * cell.real_s for cell in cells])
    for who, (label, marker, colour) in STYLES.items():
        said = np.array([1e3 * cell.predicted_s[who] for cell in cells])
        axes.scatter(real, said, s=26, marker=marker, color=colour, alpha=0.85, label=label, linewidths=1.0)
    ends = (0.8 * real.min(), 1.25 * real.max())
    axes.plot(ends, ends, color="#555555", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms a step", ylabel="predicted, ms a step", xlim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([tick for tick in TICKS_MS if ends[0] <= tick <= ends[1]]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:.0f}")
    axes.legend(frameon=False)


def _residuals(axes: Axes, cells: Sequence[Cell], *, is_of_regimes: bool) -> None:
    def row(cell: Cell) -> str:
        return f"{cell.environment}:\n{cell.strategy}" if is_of_regimes else cell.strategy

    names = list(dict.fromkeys(map(row, cells)))[::-1]
    places = {name: place for place, name in enumerate(names)}
    for offset, who in ((-0.18, "draws"), (0.0, "sim")):
        label, marker, colour = STYLES[who]
        for hollow in (False, True):
            own = [cell for cell in cells if cell.calibrated == hollow]
            if not own:
                continue
            axes.scatter(
                [100 * cell.error(who) for cell in own],
                [places[row(cell)] + offset for cell in own],
                s=22,
                marker=marker,
                facecolors="none" if hollow else colour,
                edgecolors=colour,
                label=f"{label}, calibrated on this strategy" if hollow else label,
            )
    noise = [100 * cell.noise for cell in cells if cell.noise is not None]
    if noise:
        middle = float(np.mean(noise))
        axes.axvspan(-middle, middle, color="#9fb8d0", alpha=0.35, linewidth=0, label="mean A/A noise")
    axes.axvline(0.0, color="#555555", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("error of the run time, %")
    axes.legend(fontsize=8)
