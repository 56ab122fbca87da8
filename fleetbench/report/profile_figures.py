"""Figures of a profile. Each function takes data and returns a matplotlib ``Figure``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fleetbench.fitting.laws import Fitted, Law
from fleetbench.measurements import JitterFit, Threads
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Communication
from fleetbench.report.figures import LINES, REAL, SIMULATED

Floats = npt.NDArray[np.float64]

_STYLE = {"font.size": 10, "axes.titlesize": 11}
_WIDTH_INCHES = 8.0
_MOST_NAMED = 30
"""Layers whose names fit beside their bars."""


def layer_times(table: LayerTable) -> Figure:
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


def readiness(table: LayerTable) -> Figure:
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


def thread_scaling(threads: Sequence[Threads]) -> Figure:
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


def communication_fit(communication: Communication) -> Figure:
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


def straggler_fit(compute_s: Floats, jitter: JitterFit | None) -> Figure:
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
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # names of matplotlib's own
        figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
        panels = [figure.add_subplot(1, columns, number) for number in range(1, columns + 1)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(color="#e6e6e6", linewidth=0.8)
    return figure, panels
