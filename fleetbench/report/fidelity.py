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

_BELIEFS = frozenset(
    {"name", "workload.profile", "workload.target_loss", "workload.eval_every"}
    | {f"run.{name}" for name in ("launcher", "port", "startup_timeout", "timeout")}
    | {f"cluster.{name}" for name in ("nics_per_node", "cores_per_node", "node_overrides", "sites", "collective", "measured", "gpu")}
    | {"cluster.host_bandwidth"}
)
_BELIEVED_TABLES = ("tune.", "run.environment.", "cluster.intra.", "cluster.inter.", "cluster.racks.")


def differences_of(simulated: RunResult, real: RunResult) -> list[Figures]:
    """Return all differences between two runs' experiments, ranks, steps and plans.

    Each has a ``key``, its values in ``sim`` and ``real``, and ``other_steps``: whether the runs therefore did
    not do the same work step by step. Those with ``other_steps`` come first.
    """
    found = _of_experiments(simulated, real)
    keys = [pd.MultiIndex.from_frame(run.steps.loc[run.steps["step"] >= 1, ["rank", "step"]]) for run in (simulated, real)]
    same = simulated.summary.trainers == real.summary.trainers and not keys[0].symmetric_difference(keys[1]).size
    if not same or keys[0].has_duplicates or keys[1].has_duplicates:
        spans = [
            _difference(name, _spans(simulated, column), _spans(real, column), other_steps=True)
            for name, column in (("ranks", "rank"), ("counted steps", "step"))
        ]
        found += [span for span in spans if span["sim"] != span["real"]] or spans
    if simulated.plan.digest != real.plan.digest:
        found.append(_difference("plan", _plan(simulated), _plan(real), other_steps=False))
    return sorted(found, key=lambda difference: not difference["other_steps"])


def difference_text(difference: Figures) -> str:
    """Format a difference in one line."""
    return f"{difference['key']}: {units.number(difference['sim'])} against {units.number(difference['real'])}"


def _difference(key: str, simulated: Any, real: Any, *, other_steps: bool) -> Figures:
    return {"key": key, "sim": simulated, "real": real, "other_steps": other_steps}


def _of_experiments(simulated: RunResult, real: RunResult) -> list[Figures]:
    left, right = (dict(flat(encode(run.experiment))) for run in (simulated, real))
    found = [
        _difference(key, left.get(key), right.get(key), other_steps=key not in _BELIEFS and not key.startswith(_BELIEVED_TABLES))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]
    if not found and simulated.summary.experiment != real.summary.experiment:  # the digest also covers the contents of the named files
        key = "contents of a file that the experiment names"
        found.append(_difference(key, simulated.summary.experiment, real.summary.experiment, other_steps=False))
    return found


def _spans(run: RunResult, column: str) -> str:
    """Return the range of numbers in a column, such as ``0 to 3``, and their count if some are missing."""
    values = run.steps.loc[run.steps["step"] >= 1, column]
    if values.empty:
        return "none"
    first, last, num = int(values.min()), int(values.max()), int(values.nunique())
    return f"{first} to {last}" + ("" if num == last - first + 1 else f", {num} of them")


def _plan(run: RunResult) -> str:
    return f"{len(run.plan.buckets)} buckets ({run.plan.digest[:8]})"


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
        "notes": [*_notes(simulated, real)],
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


def _notes(simulated: RunResult, real: RunResult) -> Iterator[str]:
    stragglers = real.experiment.cluster.stragglers
    left_out = [entry for entry in real.summary.skipped if entry["what"].startswith("cluster.stragglers")]
    if not stragglers:
        yield "no stragglers are declared, so none were injected: what makes real steps differ among themselves is not simulated"
    elif left_out:
        yield f"the real run did not inject the stragglers that are simulated: {left_out[0]['why']}"
    if real.summary.testbed is not None and not real.summary.testbed["counts"]:
        yield "the real run is void: the machine was not quiet in any of its repeats"
    if real.summary.emulated:
        yield "the real run emulated its compute: it slept, and sent real bytes"
    for entry in real.summary.skipped:
        if entry not in left_out:
            yield f"the real run did not realise {entry['what']}: {entry['why']}"
    other = _other_rounds(simulated, real)
    if other:
        yield f"{other} steps end a round in one run and not in the other, or one of another length"


def _other_rounds(simulated: RunResult, real: RunResult) -> int:
    """Return the number of rank 0's common steps at which a round ends in one run only, or with another length."""
    left, right = (
        run.steps[(run.steps["step"] >= 1) & (run.steps["rank"] == 0)].set_index("step")["local_steps"].astype("Float64").fillna(0)
        for run in (simulated, real)
    )
    both = left.index.intersection(right.index)
    return int((left[both].to_numpy() != right[both].to_numpy()).sum())
