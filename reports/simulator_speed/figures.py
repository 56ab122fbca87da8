"""Tables and picture of what ``measure.py`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).resolve().parent
AXES = ("trainers", "steps", "layers")


BEYOND = 3.0
"""Sizes that take so many times as long as the smallest are beyond what a run's setting up takes; an exponent is of those alone."""
FEWEST = 3
"""Sizes that an exponent is fitted to, at least."""


def measured(raw: dict[str, Any], axis: str) -> tuple[list[int], list[float]]:
    """Sizes, and fewest seconds of processor time."""
    return [run[axis] for run in raw[axis]], [min(run["cpu_s"]) for run in raw[axis]]


def fitted(sizes: list[int], took_s: list[float]) -> tuple[list[int], Any]:
    """The sizes beyond the flat part, and the straight line through them on logarithmic axes; none where they are too few."""
    beyond = [index for index, took in enumerate(took_s) if took >= BEYOND * took_s[0]]
    own = [sizes[index] for index in beyond]
    return own, np.polyfit(np.log(own), np.log([took_s[index] for index in beyond]), 1) if len(own) >= FEWEST else None


def draw(raw: dict[str, Any]) -> None:
    """Write ``scaling.png``."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 4), layout="constrained", sharey=True)
    fixed = {"trainers": "100 steps, ResNet-50", "steps": "1,000 trainers, ResNet-50", "layers": "1,000 trainers, 100 steps, a bucket each"}
    for panel, axis in zip(panels, AXES, strict=True):
        sizes, took_s = measured(raw, axis)
        panel.loglog(sizes, took_s, "o-", label="vector")
        own, line = fitted(sizes, took_s)
        if line is not None:
            panel.loglog(own, np.exp(np.polyval(line, np.log(own))), "--", color="black", label=f"fit, exponent {line[0]:.2f}", zorder=3)
        if axis == "trainers":
            small = raw["reference_small"]
            panel.loglog(
                [run["trainers"] for run in small], [10 * run["cpu_s"][0] for run in small], "s-", label="reference, 10 times 10 steps"
            )
        panel.set_xlabel(axis)
        panel.set_title(fixed[axis], fontsize=10)
        panel.grid(visible=True, which="both", alpha=0.2)
        panel.legend(fontsize=8)
    panels[0].set_ylabel("seconds of processor time")
    figure.savefig(HERE / "scaling.png", dpi=130)


def per_step(raw: dict[str, Any]) -> tuple[float, float]:
    """Processor seconds of a step of 10,000 trainers: the reference's without what comes before the first, the vector engine's with it."""
    few, more = raw["reference"]
    reference = (more["cpu_s"][0] - few["cpu_s"][0]) / (more["steps"] - few["steps"])
    return reference, min(raw["exact"]["cpu_s"]) / raw["exact"]["steps"]


def tables(raw: dict[str, Any]) -> str:
    """The README's tables."""
    exact, expected, objective = raw["exact"], raw["expected"], raw["objective"]
    reference, vector = per_step(raw)

    def off(run: dict[str, Any]) -> str:
        difference = run["compute_and_wait_s"] - expected["compute_and_wait_s"]
        figures = f"{run['compute_and_wait_s'] * 1e3:.2f} ms against {expected['compute_and_wait_s'] * 1e3:.2f} ms"
        return f"{figures}: {difference / expected['standard_error_s']:+.1f} standard errors"

    def spread(run: dict[str, Any]) -> str:
        return (
            f"{min(run['took_s']):.3g} s ({len(run['took_s'])} runs, up to {max(run['took_s']):.3g} s; processor {min(run['cpu_s']):.3g} s)"
        )

    lines = [
        "| | asked | found |",
        "|---|---|---|",
        f"| 10,000 trainers x 1,000 steps, exact draws | < 2 s | {spread(exact)} |",
        f"| its compute + wait | within 4 standard errors | {off(exact)} |",
        f"| its memory | < 2 GB | {exact['peak_mib']:.0f} MiB |",
        f"| a step of 10,000 trainers by each | >= 300 times | {reference:.3g} s / {vector * 1e3:.3g} ms = {reference / vector:.0f} |",
        f"| {objective['evaluations']:,} evaluations of the tuner's objective, 256 x 200, 2 cores | < 60 s | {objective['took_s']:.1f} s |",
        f"| their processor time, both together | | {objective['cpu_s']:.1f} s |",
        "",
        "| axis | from (processor time) | to | exponent | fitted to |",
        "|---|---|---|---|---|",
    ]
    for axis in AXES:
        sizes, took_s = measured(raw, axis)
        own, line = fitted(sizes, took_s)
        ends = [f"{sizes[place]:,}: {took_s[place] * 1e3:.4g} ms" for place in (0, -1)]
        fit = f"not known | {len(own)} beyond the flat part" if line is None else f"{line[0]:.2f} | {len(own)} sizes, from {own[0]:,}"
        lines.append(f"| {axis} | {' | '.join(ends)} | {fit} |")
    return "\n".join(lines)
