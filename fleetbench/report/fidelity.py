"""A simulated run against real ones: what matches, how large the simulation's errors are, and what is noise.

Runs of one experiment have the same batches, decisions and straggler draws, so that step 7 of one is step 7
of the other. The simulator's assumptions about links, the place where processes were started, and names may
differ; such differences are reported. Any other difference means different steps.

All figures are plain data, as ``compare --json`` prints them. An error is predicted minus true, so a positive
error means that the prediction is too slow. The prediction is a simulated run, or, for the A/A noise, one
real run taken as the prediction of another.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench import units
from fleetbench.config import encode, flat
from fleetbench.errors import ConfigError
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
    | {f"cluster.{name}" for name in ("nics_per_node", "cores_per_node", "node_overrides", "collective", "measured", "gpu")}
    | {"cluster.host_bandwidth", "cluster.first_exchange"}
)
_BELIEVED_TABLES = ("tune.", "run.environment.", "cluster.intra.", "cluster.inter.", "cluster.racks.")


def differences_of(simulated: RunResult, real: RunResult) -> list[Figures]:
    """Return all differences between two runs' experiments, ranks and steps.

    Each has ``key``, its values in ``sim`` and ``real``, and ``other_steps``. Those with ``other_steps`` come
    first: the runs did not do the same work step by step.
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
    """Return the range of numbers in a column, ``0 to 3``, and their count if some are missing."""
    values = run.steps.loc[run.steps["step"] >= 1, column]
    if values.empty:
        return "none"
    first, last, num = int(values.min()), int(values.max()), int(values.nunique())
    return f"{first} to {last}" + ("" if num == last - first + 1 else f", {num} of them")


def _plan(run: RunResult) -> str:
    return f"{len(run.plan.buckets)} buckets ({run.plan.digest[:8]})"


def compare_fidelity(a: RunResult, b: RunResult, repeats: Sequence[RunResult] = ()) -> Figures | None:
    """Compare a simulated run with a real one, in any order; none if both were executed the same way.

    ``repeats`` are further real runs of the same experiment. Raises ``ConfigError`` for a run that is not.
    The figures:

    - ``differences``: see ``differences_of``; ``comparable``: whether none of them means different steps;
    - ``errors``: see ``step_errors``; none if the runs are not comparable;
    - ``noise``: see ``noise_of``; none without repeats;
    - ``within_noise``: whether the error of the run time (``wall``), the ``step`` and each phase is at most
      the difference between real runs; empty if unknown;
    - ``notes``: what a reader must know about the steps before trusting their errors.
    """
    executors = {run.summary.executor: run for run in (a, b)}
    if set(executors) != {SIM, REAL}:
        if repeats:
            what = "repeats are for a simulated and a real run: they say what part of the error is noise"
            hint = "compare two runs, or a simulated run with real ones"
            raise ConfigError(what, "compare", f"A and B are both {a.summary.executor}", hint)
        return None
    simulated, real = executors[SIM], executors[REAL]
    for number, repeat in enumerate(repeats):
        _check_repeat(repeat, real, repeats[:number])
    differences = differences_of(simulated, real)
    comparable = not any(difference["other_steps"] for difference in differences)
    errors = step_errors(simulated, real) if comparable else None
    noise = noise_of([real, *repeats])
    void = [
        f"run {run.summary.run_id} is void and cannot show the noise: the machine was not quiet in any of its repeats"
        for run in (real, *repeats)
        if run.summary.testbed is not None and not run.summary.testbed["counts"]
    ]
    return {
        "comparable": comparable,
        "differences": differences,
        "notes": [*_notes(simulated, real), *void],
        "errors": errors,
        "noise": noise,
        "within_noise": _within_noise(errors, noise) if errors and noise else {},
    }


def step_errors(predicted: RunResult, true: RunResult) -> Figures:
    """Return the errors of ``predicted`` over all ranks and counted steps, which must be those of ``true``.

    - ``wall_s``: run times ``predicted`` and ``true``, and the logarithm of their ratio, ``log_ratio``;
    - ``step``, and each of ``PHASES`` in ``phases``: means ``predicted_s`` and ``true_s``; ``error_s``, a
      spread, also as ``share_of_step``; ``relative_bias``, a share of the phase itself, none if the true run
      has no such phase;
    - ``step.relative``: the spread of whole steps' errors as shares of the true step.
    """
    left, right = (run.steps[run.steps["step"] >= 1].set_index(["rank", "step"]).sort_index() for run in (predicted, true))
    assert left.index.equals(right.index), "runs with other ranks or steps have no errors step by step"
    predicted_s, true_s = _part(left, PARTS), _part(right, PARTS)
    step_s = float(true_s.mean())
    wall_s = predicted.summary.wall_s, true.summary.wall_s
    return {
        "wall_s": {"predicted": wall_s[0], "true": wall_s[1], "log_ratio": math.log(wall_s[0] / wall_s[1])},
        "step": _phase(PARTS, left, right, step_s) | {"relative": _spread((predicted_s - true_s) / true_s)},
        "phases": {name: _phase(columns, left, right, step_s) for name, columns in PHASES.items()},
    }


def noise_of(runs: Sequence[RunResult]) -> Figures | None:
    """Return the A/A noise: the largest of every figure of ``step_errors`` over pairs of real ``runs``.

    None for fewer than two runs. ``phases_s`` has the errors in seconds of the whole ``step`` and of each
    phase.
    """
    if len(runs) < 2:
        return None
    pairs = [step_errors(a, b) for a, b in itertools.combinations(runs, 2)]
    return {
        "runs": len(runs),
        "pairs": len(pairs),
        "wall_log_ratio": max(abs(pair["wall_s"]["log_ratio"]) for pair in pairs),
        "relative": _largest(pair["step"]["relative"] for pair in pairs),
        "phases_s": {name: _largest(_phases(pair)[name]["error_s"] for pair in pairs) for name in ("step", *PHASES)},
    }


def _phases(errors: Figures) -> Mapping[str, Figures]:
    return {"step": errors["step"], **errors["phases"]}


def _within_noise(errors: Figures, noise: Figures) -> dict[str, bool]:
    """Return whether errors are within the noise: that of the run time, and two errors of each phase.

    Both the mean absolute error and the bias of a phase must be within it. Steps of two real runs scatter
    more than simulated steps do about their mean, so the mean absolute error alone would hide a bias.
    """
    within = {"wall": abs(errors["wall_s"]["log_ratio"]) <= noise["wall_log_ratio"]}
    for name, phase in _phases(errors).items():
        limits = noise["phases_s"][name]
        within[name] = all(abs(phase["error_s"][figure]) <= abs(limits[figure]) for figure in ("mean_absolute", "bias"))
    return within


def _part(frame: pd.DataFrame, columns: Sequence[str]) -> Array:
    return np.asarray(frame[list(columns)].sum(axis=1), dtype=np.float64)


def _phase(columns: Sequence[str], left: pd.DataFrame, right: pd.DataFrame, step_s: float) -> Figures:
    predicted, true = _part(left, columns), _part(right, columns)
    error_s, true_s = _spread(predicted - true), float(true.mean())
    return {
        "predicted_s": float(predicted.mean()),
        "true_s": true_s,
        "relative_bias": error_s["bias"] / true_s if true_s else None,
        "error_s": error_s,
        "share_of_step": {name: value / step_s for name, value in error_s.items()},
    }


def _spread(errors: npt.ArrayLike) -> Spread:
    values = np.asarray(errors, dtype=np.float64)
    size = np.abs(values)
    p95 = float(np.quantile(size, 0.95))
    return {"bias": float(values.mean()), "mean_absolute": float(size.mean()), "p95": p95, "max": float(size.max())}


def _largest(spreads: Iterable[Spread]) -> Spread:
    """Return the largest value of every figure, with the sign of the largest bias."""
    found = list(spreads)
    return {name: max((spread[name] for spread in found), key=abs) for name in found[0]}


def _check_repeat(repeat: RunResult, real: RunResult, others: Sequence[RunResult]) -> None:
    where = repeat.summary.run_id if repeat.path is None else str(repeat.path)
    hint = "name real runs of B's experiment, each once"
    if repeat.summary.executor != REAL:
        raise ConfigError("a repeat is a real run", where, repeat.summary.executor, hint)
    if repeat.summary.run_id in {run.summary.run_id for run in (real, *others)}:
        raise ConfigError("is named twice: a run does not differ from itself", where, hint=hint)
    differences = differences_of(real, repeat)
    if differences and differences[0]["key"] != "plan":  # rank 0 decides the plan again in every launch
        raise ConfigError("is no repeat of B, whose experiment is another", where, difference_text(differences[0]), hint)


def _notes(simulated: RunResult, real: RunResult) -> Iterator[str]:
    stragglers = real.experiment.cluster.stragglers
    left_out = [entry for entry in real.summary.skipped if entry["what"].startswith("cluster.stragglers")]
    if not stragglers:
        yield "no stragglers are declared, so none were injected: what makes real steps differ among themselves is not simulated"
    elif left_out:
        yield f"the real run did not inject the stragglers that are simulated: {left_out[0]['why']}"
    if real.summary.emulated:
        yield "the real run emulated its compute: it slept, and sent real bytes"
    for entry in real.summary.skipped:
        if entry not in left_out:
            yield f"the real run did not realise {entry['what']}: {entry['why']}"
    other = _other_rounds(simulated, real)
    if other:
        yield f"{other} steps end a round in one run and not in the other, or one of another length"


def _other_rounds(simulated: RunResult, real: RunResult) -> int:
    """Return the number of rank 0's steps, among those of both runs, at which rounds of other lengths end."""
    left, right = (
        run.steps[(run.steps["step"] >= 1) & (run.steps["rank"] == 0)].set_index("step")["local_steps"].astype("Float64").fillna(0)
        for run in (simulated, real)
    )
    both = left.index.intersection(right.index)
    return int((left[both].to_numpy() != right[both].to_numpy()).sum())
