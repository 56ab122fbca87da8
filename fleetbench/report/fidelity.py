"""Fidelity: a simulated run against a real one, their differences, and the errors of the simulation.

Runs of one experiment have the same batches, decisions and straggler draws, so that step 7 of one is step 7
of the other. The simulator's assumptions about links, the place where processes were started, and names may
differ; such differences are reported. Any other difference means different steps.

All figures are plain data, as ``compare --json`` prints them. An error is predicted minus true, so a positive
error means that the prediction is too slow.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench import units
from fleetbench.config import encode, flat
from fleetbench.result import PARTS, RunResult

SIM, REAL = "sim", "real"
PHASES: dict[str, tuple[str, ...]] = {
    "compute": ("forward_s", "backward_s"),
    "wait": ("wait_s",),
    "exposed_comm": ("exposed_comm_s",),
    "not_compute": ("wait_s", "exposed_comm_s"),
    "update": ("update_s",),
    "other": ("other_s",),
}
"""Parts of a step, with their columns; ``not_compute`` is wait plus exposed communication."""

Figures = dict[str, Any]
Spread = dict[str, float]
"""Errors over many steps: ``bias``, their mean; ``mean_absolute``; ``p95`` and ``max`` of the absolute
errors."""
Array = npt.NDArray[np.float64]

_BELIEFS = (
    *("name", "workload.profile", "workload.target_loss", "workload.eval_every", "tune.", "run.environment."),
    *("run.launcher", "run.port", "run.startup_timeout", "run.timeout"),
    *("cluster.nics_per_node", "cluster.cores_per_node", "cluster.node_overrides", "cluster.sites", "cluster.collective"),
    *("cluster.measured", "cluster.gpu", "cluster.host_bandwidth"),
    *("cluster.intra.", "cluster.inter.", "cluster.racks."),
)
"""Beginnings of the keys that may differ between runs of the same steps."""


def differences_of(simulated: RunResult, real: RunResult) -> list[Figures]:
    """Return all differences between two runs' experiments, ranks and counted steps.

    Each has a ``key``, its values in ``sim`` and ``real``, and ``other_steps``: whether the runs therefore did
    not do the same work step by step. Those with ``other_steps`` come first.
    """
    left, right = (dict(flat(encode(run.experiment))) for run in (simulated, real))
    keys = [key for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key)]
    found: list[Figures] = [
        {"key": key, "sim": left.get(key), "real": right.get(key), "other_steps": not key.startswith(_BELIEFS)} for key in keys
    ]
    rows = [run.steps.loc[run.steps["step"] >= 1, ["rank", "step"]] for run in (simulated, real)]
    if not rows[0].sort_values(["rank", "step"], ignore_index=True).equals(rows[1].sort_values(["rank", "step"], ignore_index=True)):
        for name, column in (("ranks", "rank"), ("counted steps", "step")):
            spans = [f"{run[column].min()} to {run[column].max()}" for run in rows]
            found.append({"key": name, "sim": spans[0], "real": spans[1], "other_steps": True})
    return sorted(found, key=lambda difference: not difference["other_steps"])


def difference_text(difference: Figures) -> str:
    """Format a difference in one line."""
    return f"{difference['key']}: {units.number(difference['sim'])} against {units.number(difference['real'])}"


def compare_fidelity(a: RunResult, b: RunResult) -> Figures | None:
    """Compare a simulated run with a real one, in any order; None if both were simulated or both are real.

    - ``differences``: see ``differences_of``; ``comparable``: whether none of them means different steps;
    - ``errors``: see ``step_errors``; None if the runs are not comparable;
    - ``notes``: what a reader must know about the steps before trusting their errors.
    """
    executors = {run.summary.executor: run for run in (a, b)}
    if set(executors) != {SIM, REAL}:
        return None
    simulated, real = executors[SIM], executors[REAL]
    differences = differences_of(simulated, real)
    comparable = not any(difference["other_steps"] for difference in differences)
    return {
        "comparable": comparable,
        "differences": differences,
        "notes": [*_notes(real)],
        "errors": step_errors(simulated, real) if comparable else None,
    }


def step_errors(predicted: RunResult, true: RunResult) -> Figures:
    """Return the errors of ``predicted`` over all ranks and counted steps, which must be those of ``true``.

    - ``wall_s``: run times ``predicted`` and ``true``;
    - ``step``, and each of ``PHASES`` in ``phases``: means ``predicted_s`` and ``true_s``, and ``error_s``, a
      spread;
    - ``step.relative``: the spread of whole steps' errors as shares of the true step.
    """
    left, right = (run.steps[run.steps["step"] >= 1].set_index(["rank", "step"]).sort_index() for run in (predicted, true))
    assert left.index.equals(right.index), "runs with other ranks or steps have no errors step by step"
    predicted_s, true_s = _part(left, PARTS), _part(right, PARTS)
    return {
        "wall_s": {"predicted": predicted.summary.wall_s, "true": true.summary.wall_s},
        "step": _phase(PARTS, left, right) | {"relative": _spread((predicted_s - true_s) / true_s)},
        "phases": {name: _phase(columns, left, right) for name, columns in PHASES.items()},
    }


def _part(frame: pd.DataFrame, columns: Sequence[str]) -> Array:
    return np.asarray(frame[list(columns)].sum(axis=1), dtype=np.float64)


def _phase(columns: Sequence[str], left: pd.DataFrame, right: pd.DataFrame) -> Figures:
    predicted, true = _part(left, columns), _part(right, columns)
    return {"predicted_s": float(predicted.mean()), "true_s": float(true.mean()), "error_s": _spread(predicted - true)}


def _spread(errors: npt.ArrayLike) -> Spread:
    values = np.asarray(errors, dtype=np.float64)
    size = np.abs(values)
    p95 = float(np.quantile(size, 0.95))
    return {"bias": float(values.mean()), "mean_absolute": float(size.mean()), "p95": p95, "max": float(size.max())}


def _notes(real: RunResult) -> Iterator[str]:
    if not real.experiment.cluster.stragglers:
        yield "no stragglers are declared, so none were injected: what makes real steps differ among themselves is not simulated"
    if real.summary.testbed is not None and not real.summary.testbed["counts"]:
        yield "the real run is void: the machine was not quiet in any of its repeats"
    if real.summary.emulated:
        yield "the real run emulated its compute: it slept, and sent real bytes"
    for entry in real.summary.skipped:
        yield f"the real run did not realise {entry['what']}: {entry['why']}"
