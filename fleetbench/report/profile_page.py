"""The page of a profile: one file that needs no network."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from fleetbench.experiment import Experiment
from fleetbench.fitting.stragglers import jitter_times
from fleetbench.measurements import FOREIGN_LIMIT
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, compute_key
from fleetbench.report import profile_figures, units
from fleetbench.report.figures import data_uri
from fleetbench.report.page import render_page

Floats = npt.NDArray[np.float64]

_FEWEST_STEPS = 2


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
        drawn.append(("Layers", caption, profile_figures.layer_times(table)))
        caption = "What is ready early can travel while the rest of the backward goes on."
        drawn.append(("Readiness", caption, profile_figures.readiness(table)))
    if len(profile.threads) > 1:
        caption = "All trainers of the node compute at once, and share its cores."
        drawn.append(("Threads", caption, profile_figures.thread_scaling(profile.threads)))
    if profile.communication is not None and profile.communication.points:
        caption = (
            "Measured inside training, of every gradient by itself and of all together; most of the fit's weight lies on all together. "
            f"The farthest point is {units.percent(profile.communication.largest_residual)} from the line."
        )
        drawn.append(("Communication", caption, profile_figures.communication_fit(profile.communication)))
    compute = _compute(steps)
    if profile.stragglers is not None and compute.size >= _FEWEST_STEPS:
        caption = (
            "Steps in which nothing travels beside compute, without episodes and as if no rank were persistently slow. "
            "Points on the grey line are where the law says."
        )
        times = jitter_times(compute, profile.stragglers)
        drawn.append(("Stragglers", caption, profile_figures.straggler_fit(times, profile.stragglers.jitter)))
    return drawn


def _compute(steps: pd.DataFrame) -> Floats:
    """Seconds of forward and backward by rank and step, of the leg that the straggler model was fitted to: the first."""
    if steps.empty:
        return np.zeros((0, 0))
    counted = steps[(steps["leg"] == steps["leg"].iloc[0]) & (steps["step"] >= 1)]
    compute = counted.assign(compute_s=counted["forward_s"] + counted["backward_s"])
    return np.asarray(compute.pivot_table(index="rank", columns="step", values="compute_s").to_numpy(), dtype=float)
