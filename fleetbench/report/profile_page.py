"""The page of a profile: one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fleetbench.experiment import Experiment
from fleetbench.fitting.laws import Fitted, Law
from fleetbench.fitting.stragglers import jitter_times
from fleetbench.measurements import FOREIGN_LIMIT, JitterFit, Threads
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Communication, Profile, compute_key
from fleetbench.report import units
from fleetbench.report.figures import LINES, REAL, SIMULATED, data_uri, new_figure
from fleetbench.report.html import render_page

Floats = npt.NDArray[np.float64]

_FEWEST_STEPS = 2
_MOST_NAMED = 30
"""Layers whose names fit beside their bars."""


def render_profile(experiment: Experiment, profile: Profile, steps: pd.DataFrame) -> str:
    """The page's text; ``steps`` holds every leg's steps, as ``steps.parquet`` does."""
    own = own_table(experiment, profile)
    pictures = [(title, caption, data_uri(figure)) for title, caption, figure in _pictures(own, profile, steps)]
    return render_page("profile.html", experiment=experiment, profile=profile, table=own, pictures=pictures, foreign_limit=FOREIGN_LIMIT)


def own_table(experiment: Experiment, profile: Profile) -> LayerTable | None:
    """The table of the experiment's own thread count; none where none was measured."""
    key = compute_key(experiment)
    return next((table for table in profile.tables if table.key == key), next(iter(profile.tables), None))


def _pictures(table: LayerTable | None, profile: Profile, steps: pd.DataFrame) -> list[tuple[str, str, Figure]]:
    """Title, caption and figure of all that was measured."""
    drawn: list[tuple[str, str, Figure]] = []
    if table is not None:
        caption = (
            "Medians over steps and trainers, in the order in which the backward finishes layers; whiskers: median absolute deviation."
        )
        drawn.append(("Layers", caption, _layer_times(table)))
        caption = "What is ready early can travel while the rest of the backward goes on."
        drawn.append(("Readiness", caption, _readiness(table)))
    if len(profile.threads) > 1:
        caption = "All trainers of the node compute at once, and share its cores."
        drawn.append(("Threads", caption, _thread_scaling(profile.threads)))
    if profile.communication is not None and profile.communication.points:
        caption = (
            "Measured inside training, of every gradient by itself and of all together; most of the fit's weight lies on all together. "
            f"The farthest point is {units.percent(profile.communication.largest_residual)} from the line."
        )
        drawn.append(("Communication", caption, _communication_fit(profile.communication)))
    compute = _compute(steps)
    if profile.stragglers is not None and compute.size >= _FEWEST_STEPS:
        caption = (
            "Steps in which nothing travels beside compute, without episodes and as if no rank were persistently slow. "
            "Points on the grey line are where the law says."
        )
        times = jitter_times(compute, profile.stragglers)
        drawn.append(("Stragglers", caption, _straggler_fit(times, profile.stragglers.jitter)))
    return drawn


def _compute(steps: pd.DataFrame) -> Floats:
    """Seconds of forward and backward by rank and step, of the leg that the straggler model was fitted to: the first."""
    if steps.empty:
        return np.zeros((0, 0))
    counted = steps[(steps["leg"] == steps["leg"].iloc[0]) & (steps["step"] >= 1)]
    compute = counted.assign(compute_s=counted["forward_s"] + counted["backward_s"])
    return np.asarray(compute.pivot_table(index="rank", columns="step", values="compute_s").to_numpy(), dtype=float)


def _layer_times(table: LayerTable) -> Figure:
    """Forward and backward of every layer in ms, the layer whose gradients are ready first on top; spread by MAD."""
    layers = [layer for layer in reversed(table.layers) if layer.gradients]
    figure, (axes,) = _figure(max(2.4, min(7.0, 0.9 + 0.2 * len(layers))))
    at = np.arange(len(layers))
    for shift, colour, label, times, spreads in (
        (-0.2, SIMULATED, "forward", [layer.forward for layer in layers], [layer.forward_mad for layer in layers]),
        (0.2, REAL, "backward", [layer.backward for layer in layers], [layer.backward_mad for layer in layers]),
    ):
        spread = np.array(spreads) * 1e-6 if len(layers) <= _MOST_NAMED else None
        axes.barh(at + shift, np.array(times) * 1e-6, 0.4, xerr=spread, color=colour, label=label, ecolor="#e0a030")
    if len(layers) <= _MOST_NAMED:
        axes.set_yticks(at, [layer.name or "(the model)" for layer in layers], fontsize=8)
    else:
        axes.set_ylabel(f"{len(layers)} layers, first ready on top")
        axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(frameon=False)
    return figure


def _readiness(table: LayerTable) -> Figure:
    """Share of the gradients' bytes that is ready, over the time since the backward began."""
    figure, (axes,) = _figure(3.0)
    gradients = table.by_readiness()
    total = sum(gradient.nbytes for gradient in gradients) or 1
    times = np.array([0, *(gradient.ready for gradient in gradients), table.backward_ns]) * 1e-6
    shares = np.cumsum([0, *(gradient.nbytes for gradient in gradients), 0]) / total
    axes.step(times, 100 * shares, where="post", color=REAL, linewidth=1.8)
    axes.set_xlabel("ms since the backward began")
    axes.set_ylabel("bytes of gradients ready (%)")
    axes.set_ylim(0, 104)
    return figure


def _thread_scaling(threads: Sequence[Threads]) -> Figure:
    """Speed-up of compute and of the whole step over the first thread count, beside the ideal."""
    figure, (axes,) = _figure(3.0)
    counts = [line.thread_num for line in threads]
    first = threads[0]
    axes.plot(counts, [count / counts[0] for count in counts], "--", color="#999999", label="ideal")
    axes.plot(counts, [first.compute / line.compute for line in threads], "o-", color=LINES[0], label="forward and backward")
    axes.plot(counts, [first.step / line.step for line in threads], "s-", color=LINES[1], label="step, with communication")
    axes.set_xticks(counts)
    axes.set_xlabel("threads of a trainer")
    axes.set_ylabel("speed-up")
    axes.legend(frameon=False)
    return figure


def _communication_fit(communication: Communication) -> Figure:
    """What all-reduces took in the loop by their size, means with median absolute deviations, and the fitted line."""
    figure, (axes,) = _figure(3.4)
    sizes = np.array([point.nbytes for point in communication.points], dtype=float)
    took = np.array([point.took for point in communication.points]) * 1e-6
    spread = np.minimum(np.array([point.mad for point in communication.points]) * 1e-6, 0.95 * took)
    axes.errorbar(sizes, took, yerr=spread, fmt="o", markersize=4, color=REAL, ecolor="#e0a030", label="measured, with MAD")
    steps, link = 2 * (communication.trainers - 1), communication.link
    grid = np.geomspace(max(1.0, sizes.min()), max(2.0, sizes.max()), 200)
    line = (steps * link.latency + steps / communication.trainers * grid * 8e9 / link.bandwidth) * 1e-6
    axes.plot(grid, line, color=LINES[1], linewidth=1.4, label="latency and bandwidth fitted")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes of an all-reduce")
    axes.set_ylabel("ms, from the last trainer's arrival")
    axes.legend(frameon=False)
    return figure


def _straggler_fit(compute_s: Floats, jitter: JitterFit | None) -> Figure:
    """Histogram of compute times with the fitted law; beside it measured against fitted quantiles."""
    times = np.sort(np.asarray(compute_s, dtype=float).ravel()) * 1e3
    figure, (histogram, quantiles) = _figure(3.4, 2)
    most = float(np.quantile(times, 0.995))
    histogram.hist(times[times <= most], bins=min(60, max(5, len(times) // 8)), density=True, color=SIMULATED, label="measured")
    histogram.set_xlabel("forward and backward (ms)")
    histogram.set_ylabel("density")
    if jitter is None:
        quantiles.plot((np.arange(len(times)) + 0.5) / len(times), times, color=REAL)
        quantiles.set_xlabel("share of the steps")
        quantiles.set_ylabel("ms, at most")
        return figure
    law = Fitted(
        law=cast("Law", jitter.distribution),
        base_s=jitter.base * 1e-9,
        mean=jitter.mean,
        cv=jitter.cv,
        log_likelihood=0.0,
        bic=0.0,
    )
    edges = np.linspace(times[0], most, 200)
    density = np.diff(law.cdf(edges * 1e-3)) / np.diff(edges)
    histogram.plot((edges[:-1] + edges[1:]) / 2, density, color=LINES[1], linewidth=1.6, label=jitter.distribution)
    histogram.legend(frameon=False)
    shares = (np.arange(len(times)) + 0.5) / len(times)
    fitted = law.quantile(shares) * 1e3
    quantiles.plot(fitted, times, "o", markersize=3, color=REAL)
    ends = [min(fitted[0], times[0]), max(fitted[-1], times[-1])]
    quantiles.plot(ends, ends, color="#999999", linewidth=1)
    quantiles.set_xlabel("fitted quantile (ms)")
    quantiles.set_ylabel("measured (ms)")
    return figure


def _figure(height_inches: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure, panels = new_figure(height_inches, columns=columns)
    for axes in panels:
        axes.grid(color="#e6e6e6", linewidth=0.8)
    return figure, panels
