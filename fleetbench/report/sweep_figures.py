"""Figures of a sweep. Each function takes its table and returns a matplotlib ``Figure``; none shows or stores it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fleetbench.report.figures import LINES, PARTS, STYLE, new_figure

Floats = npt.NDArray[np.float64]

_SPLIT = (
    ("compute_s", "compute"),
    ("wait_s", "wait for the slowest"),
    ("exposed_comm_s", "exposed communication"),
    ("update_s", "update"),
    ("other_s", "other"),
)
_SPAN = 8.0
"""Values whose largest is so many times the smallest are drawn on a logarithmic axis."""


def sweep_figure(table: pd.DataFrame, keys: Sequence[str], name: str) -> Figure:
    """One key: throughput with scaling efficiency (where the key changes the number of trainers), and the step's parts.

    Two keys: samples per second over the last of them, a line for each value of the other.
    Numbers are drawn in their order, and all else as it comes.
    """
    table = _in_order(table, keys)
    return scaling_curve(table, keys[0], name) if len(keys) == 1 else _lines(table, keys, name)


def scaling_curve(table: pd.DataFrame, key: str, name: str) -> Figure:
    """Throughput over one key, against the first row's times the trainers, and where a step's time goes."""
    figure, (above, below) = new_figure(6.4, rows=2)
    at, labels, is_log = _positions(table[key])
    throughput = table["samples_per_s"].to_numpy(dtype=float)
    above.plot(at, throughput, "o-", color=LINES[0], label="simulated")
    if table["trainers"].min() < table["trainers"].max():
        ideal = throughput[0] * table["trainers"].to_numpy(dtype=float) / float(table["trainers"].iloc[0])
        above.plot(at, ideal, "--", color="#888888", label=f"linear from {table['trainers'].iloc[0]} trainers")
        for x, y, share in zip(at, throughput, throughput / ideal, strict=True):
            above.annotate(f"{100 * share:.0f} %", (x, y), textcoords="offset points", xytext=(4, -12), fontsize=8, color="#444444")
    _scale(above.set_yscale, throughput)
    above.margins(y=0.12)  # room for the shares
    above.set_ylabel("samples per second")
    above.legend(frameon=False, fontsize=9)
    below.stackplot(
        at, *(table[column].to_numpy(dtype=float) * 1e3 for column, _ in _SPLIT), labels=[label for _, label in _SPLIT], colors=PARTS
    )
    below.set_ylabel("mean step (ms)")
    below.set_ylim(0, None)
    below.legend(frameon=False, fontsize=9, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    _name_axis(below, key, at, labels, is_log)
    _tidy(above, f"{name}: {key}")
    _tidy(below)
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Write PNG or SVG, as the path ends; equal figures give equal bytes."""
    dated = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with mpl.rc_context(STYLE):
        figure.savefig(path, dpi=130, metadata=dated)


def _in_order(table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The table by its keys, the first one varying slowest: a line through 8, 1 and 2 would fold back on itself."""
    places = [table[key].to_numpy() if _is_number(table[key]) else pd.factorize(table[key])[0] for key in reversed(keys)]
    return table.iloc[np.lexsort(places)]


def _is_number(values: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values))


def _lines(table: pd.DataFrame, keys: Sequence[str], name: str) -> Figure:
    figure, (axes,) = new_figure(4.2)
    at, labels, is_log = _positions(table[keys[1]].drop_duplicates())
    for colour, (value, part) in zip(itertools.cycle(LINES), table.groupby(keys[0], sort=False), strict=False):
        axes.plot(at, part["samples_per_s"].to_numpy(dtype=float), "o-", color=colour, label=f"{keys[0]} = {value}")
    _scale(axes.set_yscale, table["samples_per_s"].to_numpy(dtype=float))
    axes.set_ylabel("samples per second")
    axes.legend(frameon=False, fontsize=9)
    _name_axis(axes, keys[1], at, labels, is_log)
    _tidy(axes, f"{name}: {keys[0]} and {keys[1]}")
    return figure


def _positions(values: pd.Series) -> tuple[Floats, list[str], bool]:
    """Where values lie on an axis, what they are called, and whether the axis is logarithmic."""
    labels = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    if not _is_number(values):
        return np.arange(len(labels), dtype=float), labels, False
    at = values.to_numpy(dtype=float)
    return at, labels, bool(at.min() > 0 and at.max() / at.min() >= _SPAN)


def _name_axis(axes: Axes, key: str, at: Floats, labels: Sequence[str], is_log: bool) -> None:
    if is_log:
        axes.set_xscale("log")
    axes.set_xticks(at, labels)
    axes.set_xticks([], minor=True)
    if len(labels) > 12:
        shown = np.linspace(0, len(labels) - 1, 12).round().astype(int)
        axes.set_xticks(at[shown], [labels[index] for index in shown])
    axes.set_xlabel(key)


def _scale(set_scale: Callable[[str], object], values: Floats) -> None:
    if values.min() > 0 and values.max() / values.min() >= _SPAN:
        set_scale("log")


def _tidy(axes: Axes, title: str | None = None) -> None:
    axes.grid(color="#e6e6e6", linewidth=0.8)
    if title is not None:
        axes.set_title(title, loc="left")
