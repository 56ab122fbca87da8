"""Figures of reports and notebooks: each function takes runs or a table, and returns one figure.

A figure is a matplotlib ``Figure`` whose ``data`` is the table that is drawn. Only ``save_png`` stores figures, and
none shows them. Lines differ in marker and style, and bars in hatches, so that figures are readable in
black and white.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from fleetbench.errors import ConfigError
from fleetbench.report.model import splits_of
from fleetbench.result import PARTS, RunResult

if TYPE_CHECKING:
    from sim.many.what_if import Case
    from tuner.recommendation import Arm
    from tuner.simulated.answer import SimulatedRecommendation
    from tuner.simulated.sizes import Sizes

_PARTS = ("#1f4e79", "#e0a030", "#c44e35", "#5b9a68", "#b5b5b5")
"""Colours of the parts in ``SPLIT``, which also differ in lightness and hatch."""
_HATCHES = ("", "////", "xxxx", "....", "")
_LINES = tuple(zip(("#1f4e79", "#c44e35", "#5b9a68", "#e0a030", "#7a5195", "#6b6b6b"), "os^Dv*", ("-", "--", "-.", ":") * 2, strict=False))
"""Colour, marker and style of each line, in order."""
_SPANS = {
    "forward": ("#9fb8d0", ""),
    "backward": ("#1f4e79", ""),
    "communication": ("#c44e35", "////"),
    "wait": ("#f3d9a4", "...."),
    "update": ("#5b9a68", "xxxx"),
    "input": ("#b08bbb", "\\\\\\\\"),
    "other": ("#d0d0d0", ""),
}
_LEGEND_COLUMNS = 6
"""Largest number of columns of a legend above the axes."""
_ROUNDING_S = 1e-9
"""Rounding of times in seconds, which stand for whole nanoseconds."""
_STYLE: Any = {"font.size": 10, "svg.hashsalt": "fleetbench", "svg.fonttype": "path", "axes.titlesize": 11, "hatch.linewidth": 0.5}


class Drawing(Figure):
    """A figure whose ``data`` is the table that it shows. A notebook displays it as a PNG."""

    data: pd.DataFrame

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        with mpl.rc_context(_STYLE):
            self.savefig(buffer, format="png", dpi=90)
        return buffer.getvalue()


def simulated_against_real(arms: Sequence[Arm]) -> Drawing:
    """Draw the mean step time of every arm in ms, simulated and real."""
    names = [arm.name if arm.error is None else f"{arm.name} ({100 * arm.error:+.1f} %)" for arm in arms]
    table = pd.DataFrame({"simulated": [arm.simulated_s for arm in arms], "real": [arm.real_s for arm in arms]}, names, dtype=float)
    return _bars(table * 1e3, "mean step time (ms); in brackets: error simulated", _HATCHES[1::-1], color=["#9fb8d0", "#1f4e79"])


def step_breakdown(runs: Mapping[str, RunResult] | pd.DataFrame) -> Drawing:
    """Draw the mean time of a step in ms, one bar per run, stacked from the parts in ``SPLIT``.

    ``runs`` are runs by label, or a table of seconds with a row per label and a column per part.
    """
    table = runs if isinstance(runs, pd.DataFrame) else splits_of({label: [run] for label, run in runs.items()})
    figure = _bars(table * 1e3, "mean time of a step and trainer (ms)", _HATCHES, stacked=True, color=_PARTS)
    figure.axes[0].set_xlim(0, 1.05 * figure.data.sum(axis=1).max())
    return figure


def timeline(run: RunResult | pd.DataFrame, first: int = 1, last: int | None = None, ranks: Sequence[int] | None = None) -> Drawing:
    """Draw each rank's work in the steps ``first`` to ``last`` (default: one step), in ms from their start.

    ``run`` is a run with a timeline, or a table such as ``run.timeline``, of which all steps are drawn. Numbers
    on collectives are buckets. ``ranks`` defaults to all.
    """
    if isinstance(run, RunResult):
        own, spans = run.steps[run.steps["step"].between(first, first if last is None else last)], run.timeline
        origin, end_s = own["start_s"].min(), (own["start_s"] + own[list(PARTS)].sum(axis=1)).max()
        spans = spans[(spans["start_s"] < end_s - _ROUNDING_S) & (spans["start_s"] + spans["duration_s"] > origin + _ROUNDING_S)]
    else:
        spans, origin = run, run["start_s"].min()
    spans = spans[~spans["name"].str.startswith("start ") & (spans["rank"].isin(spans["rank"] if ranks is None else ranks))]
    kinds = spans["name"].where(spans["name"].isin(list(_SPANS)), "other")
    kinds = kinds.mask(spans["stream"].str.startswith("communication"), "communication").mask(spans["stream"] == "update", "update")
    data = spans.assign(start_ms=1e3 * (spans["start_s"] - origin), duration_ms=1e3 * spans["duration_s"], kind=kinds)
    end_ms = (data["start_ms"] + data["duration_ms"]).max()
    tracks = {track: place for place, track in enumerate(dict.fromkeys(zip(data["rank"], data["stream"], data["row"], strict=True)))}
    figure = _figure(1.2 + 0.32 * len(tracks), data.drop(columns=["start_s", "duration_s"]))
    axes = figure.subplots()
    for kind, own in data.groupby("kind"):
        colour, hatch = _SPANS[str(kind)]
        places = [tracks[track] for track in zip(own["rank"], own["stream"], own["row"], strict=True)]
        shape: Any = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4, "label": kind}
        bars = axes.barh(places, own["duration_ms"], 0.8, own["start_ms"], **shape)
        numbers = own["name"].str.extract(r" (\S+)$", expand=False).where((own["duration_ms"] > end_ms / 40) & (kind == "communication"))
        axes.bar_label(
            bars, numbers.fillna(""), label_type="center", fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        )
    labels = [f"rank {rank}, {stream}" if row == 0 else "" for rank, stream, row in tracks]
    axes.set_yticks(range(len(tracks)), labels, fontsize=9)
    axes.set(xlabel="time (ms)", xlim=(0, end_ms))
    axes.invert_yaxis()
    _finish(axes, above=True)
    return figure


def loss_against_time(runs: Mapping[str, RunResult | Sequence[RunResult]] | pd.DataFrame, target: float | None = None) -> Drawing:
    """Draw the loss over steps, and next to it over seconds.

    Args:
        runs: runs by label, or a table with ``label``, ``step``, ``seconds`` and ``loss``. Several runs of a
            label, with different seeds, are drawn as their median in a band from the lowest to the highest
            loss. If every run has evaluated, held-out losses are drawn; otherwise the trainers' mean loss on
            their batches, averaged over a thirtieth of the run.
        target: held-out loss at which a line is drawn, if held-out losses are drawn.

    Raises ``ConfigError`` for a run without losses.
    """
    is_held_out = True
    if isinstance(runs, pd.DataFrame):
        data = runs
    else:
        several = {label: [run] if isinstance(run, RunResult) else run for label, run in runs.items()}
        is_held_out = all(run.held_out for own in several.values() for run in own)
        data = pd.concat([_over_seeds(label, own, is_held_out=is_held_out) for label, own in several.items()])
    figure = _figure(3.6 + 0.15 * data["label"].nunique(), data)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, column, label in ((left, "step", "steps of a trainer"), (right, "seconds", "time (s)")):
        for own, line in _lines(axes, data, "label", column, "loss", markevery=max(1, len(data) // data["label"].nunique() // 8)):
            if "low" in own and (own["low"] < own["high"]).any():
                axes.fill_between(own[column], own["low"], own["high"], color=line.get_color(), alpha=0.2, linewidth=0)
        if target is not None and is_held_out:
            axes.axhline(target, color="black", linewidth=0.8, linestyle=(0, (1, 3)), label=f"target, {target:g}")
        axes.set_xlabel(label)
        _finish(axes, legend=False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    left.set_ylabel("held-out loss" if is_held_out else "loss of the batches")
    return figure


def scaling(found: Sizes | pd.DataFrame) -> Drawing:
    """Draw samples per second over the number of trainers, with an ideal line; below, efficiency.

    ``found`` is the result of ``tune --simulate-only --sweep``, or a table with ``trainers`` and
    ``samples_per_s``, such as a sweep's, and with ``label`` if there are several lines. An efficiency of 100 %
    is the samples per second and trainer in a line's first row. The ideal line is that of the last label.
    """
    data, title = (found, "") if isinstance(found, pd.DataFrame) else (_of_sizes(found), f"{found.name}: SIMULATED, {found.compute}")
    data = data if "label" in data else data.assign(label="samples per second")
    per_trainer = data["samples_per_s"] / data["trainers"]
    data = data.assign(efficiency_percent=100 * per_trainer / per_trainer.groupby(data["label"]).transform("first"))
    figure = _figure(5.6, data)
    above, below = figure.subplots(2, 1, sharex=True)
    first = data[data["label"] == data["label"].iloc[-1]]
    above.plot(first["trainers"], per_trainer.loc[first.index].iloc[0] * first["trainers"], color="#6b6b6b", linewidth=0.8, label="ideal")
    for axes, column in ((above, "samples_per_s"), (below, "efficiency_percent")):
        _lines(axes, data, "label", "trainers", column)
    above.set(ylabel="samples per second", title=title, yscale="log")
    _thousands(above.yaxis)
    below.set(ylim=(0, 105), ylabel="efficiency (%)", xlabel="trainers")
    _log_ticks(below, data["trainers"])
    _finish(above)
    _finish(below, legend=False)
    return figure


def curves(table: pd.DataFrame, x: str, y: str, by: str | None = None, bound: str | None = None, **labels: str) -> Drawing:
    """Draw the column ``y`` over ``x``, a logarithmic axis, with one line for each value of the column ``by``.

    ``bound`` is a column that ``y`` should not exceed; it is drawn dotted. ``labels`` may be ``xlabel``,
    ``ylabel`` and ``title``.
    """
    figure = _figure(3.8, table[[name for name in (by, x, y, bound) if name is not None]])
    axes = figure.subplots()
    _lines(axes, table, by, x, y)
    if bound is not None:
        own = table.drop_duplicates(x).sort_values(x)
        axes.plot(own[x], own[bound], color="black", linewidth=1.2, linestyle=(0, (1, 2)), label=bound)
    _log_ticks(axes, table[x])
    axes.set(**{"xlabel": x, "ylabel": y, "ylim": (0, None)} | labels)
    _finish(axes, legend=by is not None or bound is not None)
    return figure


def sensitivity(found: SimulatedRecommendation | Sequence[Case]) -> Drawing:
    """Draw the mean step time in ms, or the seconds to a target, unchanged and with one change per row.

    ``found`` is an answer of ``tune --simulate-only``, with marks at rows that change the answer; or the result
    of ``what_if``.
    """
    if isinstance(found, Sequence):
        table = pd.DataFrame({"step": {case.name: case.summary.step_s["mean"] for case in found}})
    else:
        rows = {
            f"{case.assumption}{', changes the answer' if case.changes_answer else ''}": (case.default_s, case.recommended_s, case.best_s)
            for case in found.cases
        }
        table = pd.DataFrame.from_dict(rows, "index", columns=["the experiment's own", "recommended", "best under this change"])
    target = getattr(found, "target_loss", None)
    table = table * 1e3 if target is None else table
    figure = _figure(1.3 + 0.32 * len(table), table)
    axes, places = figure.subplots(), range(len(table))
    for name, (colour, marker, _) in zip(table.columns, _LINES, strict=False):
        axes.axvline(table[name].iloc[0], color=colour, linewidth=0.8, linestyle=":")
        axes.plot(table[name], places, marker, color=colour, markersize=8, fillstyle="none", label=name)
    axes.set_yticks(places, list(table.index))
    axes.set_xlabel(f"{'mean step time (ms)' if target is None else f'seconds to loss {target:g}'}; dotted: as it is")
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    _finish(axes, above=True, legend=len(table.columns) > 1)
    return figure


def residuals(found: pd.DataFrame, band_percent: float | None = None) -> Drawing:
    """Draw the errors of predicted times in per cent over the measured time.

    ``found`` is a table with ``measured_s`` and ``predicted_s``, and with ``group`` if there are several groups.
    ``band_percent`` is drawn as a band around 0: the difference between measurements, or the claimed error.
    """
    data = found if "group" in found else found.assign(group="predictions")
    data = data.assign(error_percent=100 * (data["predicted_s"] / data["measured_s"] - 1))
    figure = _figure(3.8, data)
    axes = figure.subplots()
    if band_percent is not None:
        axes.axhspan(-band_percent, band_percent, color="#e3e3e3", linewidth=0, label=f"within {band_percent:g} %")
    axes.axhline(0, color="black", linewidth=0.8)
    _lines(axes, data.assign(measured_ms=1e3 * data["measured_s"]), "group", "measured_ms", "error_percent", linestyle="")
    axes.set(xscale="log", xlabel="measured (ms)", ylabel="predicted over measured, minus 1 (%)")
    _thousands(axes.xaxis)
    _finish(axes)
    return figure


def data_uri(figure: Figure) -> str:
    """Return the figure as an SVG in a ``data:`` URI; equal figures give equal text."""
    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG."""
    with mpl.rc_context(_STYLE):
        figure.savefig(path, dpi=120, format="png")


def _lines(axes: Axes, data: pd.DataFrame, by: str | None, x: str, y: str, **options: Any) -> list[tuple[pd.DataFrame, Line2D]]:
    """Draw ``y`` over ``x`` with one line for each value of ``by``; return each line with its part of the data."""
    groups: Any = [(y, data)] if by is None else data.groupby(by, sort=False)
    drawn = []
    for (label, own), (colour, marker, style) in zip(groups, cycle(_LINES)):
        plain: Any = {"color": colour, "marker": marker, "linestyle": style, "markersize": 5, **options}
        text = str(label).replace("$", "\\$")  # otherwise matplotlib reads a formula
        drawn.append((own, axes.plot(own[x], own[y], label=text, **plain)[0]))
    return drawn


def _log_ticks(axes: Axes, values: pd.Series) -> None:
    """Make the x axis logarithmic, with a tick at each of the values."""
    ticks = sorted(values.unique())
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _figure(height: float, data: pd.DataFrame) -> Drawing:
    with mpl.rc_context(_STYLE):
        figure = Drawing(figsize=(8.0, height), layout="constrained")
    figure.data = data
    return figure


def _finish(axes: Axes, *, above: bool = False, legend: bool = True) -> None:
    """Add a thin grid below the data, and the legend, ``above`` the axes or inside."""
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    handles, _ = axes.get_legend_handles_labels()
    if legend and handles:
        rows = math.ceil(len(handles) / _LEGEND_COLUMNS)
        place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": math.ceil(len(handles) / rows)} if above else {}
        axes.legend(frameon=False, fontsize=9, **place)


def _thousands(axis: Axis) -> None:
    """Set ticks of a logarithmic axis at 100, 200, 500, 1,000, ..."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,.0f}")
    axis.set_minor_locator(NullLocator())


def _bars(table: pd.DataFrame, label: str, hatches: Sequence[str], **options: Any) -> Drawing:
    """Draw horizontal bars, the table's first row on top."""
    figure = _figure(1.1 + 0.34 * max(len(table) if options.get("stacked") else table.size, 1), table)
    with mpl.rc_context(_STYLE):
        axes = table.plot.barh(ax=figure.subplots(), width=0.7, xlabel=label, edgecolor="white", linewidth=0.4, **options)
    for bars, hatch in zip((own for own in axes.containers if isinstance(own, BarContainer)), hatches, strict=False):
        for bar in bars:
            bar.set_hatch(hatch)
    axes.invert_yaxis()
    _finish(axes, above=True)
    return figure


def _over_seeds(label: str, runs: Sequence[RunResult], *, is_held_out: bool) -> pd.DataFrame:
    """Return the median of the runs at the steps that all of them have, with the lowest and highest loss."""
    each = pd.concat([_losses(label, run, is_held_out=is_held_out) for run in runs]).groupby("step")
    found = each[["seconds", "loss"]].median().assign(low=each["loss"].min(), high=each["loss"].max(), label=label)
    return found[each.size() == len(runs)].reset_index()


def _losses(label: str, run: RunResult, *, is_held_out: bool) -> pd.DataFrame:
    """Return a table of label, step, loss, and seconds from the first counted start until all ranks end the step."""
    steps = run.steps[run.steps["step"] >= 1]
    ends = (steps["start_s"] + steps[list(PARTS)].sum(axis=1)).groupby(steps["step"]).max() - steps["start_s"].min()
    loss = steps.groupby("step")["loss"].mean().rolling(max(1, len(ends) // 30), min_periods=1).mean()
    if is_held_out:
        loss = pd.Series({step: loss for step, loss in run.held_out if step in ends.index})
    if loss.isna().all():
        hint = "run it with workload.target_loss, or simulate it with --loss"
        raise ConfigError("a run without losses", label, hint=hint)
    return pd.DataFrame({"label": label, "step": loss.index, "seconds": ends[loss.index].to_numpy(), "loss": loss.to_numpy()})


def _of_sizes(found: Sizes) -> pd.DataFrame:
    rows = [("the experiment's own strategy", size.trainers, size.samples_per_s * size.step_s / size.default_s) for size in found.sizes]
    rows += [("best strategy", size.trainers, size.samples_per_s) for size in found.sizes]
    return pd.DataFrame(rows, columns=["label", "trainers", "samples_per_s"])
