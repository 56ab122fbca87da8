"""Step errors: by how much a predicted run misses a true one, step by step and phase by phase.

The prediction is a simulated run; or, for the A/A noise, one real run taken for the prediction of
another. An error is predicted minus true: above zero the prediction is too slow.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench.result import RunResult

Array = npt.NDArray[np.float64]

PHASES: dict[str, tuple[str, ...]] = {
    "compute": ("forward_s", "backward_s"),
    "wait": ("wait_s",),
    "exposed_comm": ("exposed_comm_s",),
    "not_compute": ("wait_s", "exposed_comm_s"),
    "update": ("update_s",),
    "other": ("other_s",),
}
"""Parts of a step, by their columns; ``not_compute`` is wait and exposed communication together."""
_ALL = ("forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Errors of many steps: their mean, and their size."""

    bias: float
    """Mean, with its sign."""
    mean_absolute: float
    p95: float
    """Of the absolute errors, between neighbours where it falls between them."""
    max: float

    @classmethod
    def of(cls, errors: Array) -> Spread:
        """Over all values."""
        size = np.abs(errors)
        return cls(bias=float(errors.mean()), mean_absolute=float(size.mean()), p95=float(np.quantile(size, 0.95)), max=float(size.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One part of the step: means of both runs, and the errors in seconds over all ranks and steps."""

    name: str
    predicted_s: float
    true_s: float
    error_s: Spread

    @property
    def relative_bias(self) -> float | None:
        """Bias as a share of the phase itself; none where the true run has no such phase."""
        return self.error_s.bias / self.true_s if self.true_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrors:
    """All errors of one run against another, over the counted steps of all ranks."""

    predicted_wall_s: float
    true_wall_s: float
    step: Phase
    """Whole steps."""
    relative: Spread
    """Errors of whole steps as shares of the true step."""
    by_rank: dict[int, Spread]
    """The same, of every rank by itself."""
    phases: tuple[Phase, ...]
    table: pd.DataFrame
    """``rank``, ``step``, ``predicted_s``, ``true_s``, ``error`` (a share of the true step)."""

    @property
    def wall_log_ratio(self) -> float:
        """Logarithm of predicted over true run time."""
        return math.log(self.predicted_wall_s / self.true_wall_s)

    @property
    def worst(self) -> tuple[int, int, float, float]:
        """Rank, step, predicted and true seconds of the step with the largest relative error."""
        at = int(np.argmax(np.abs(self.table["error"].to_numpy())))
        rank, step, predicted_s, true_s = (self.table[name].iloc[at] for name in ("rank", "step", "predicted_s", "true_s"))
        return int(rank), int(step), float(predicted_s), float(true_s)

    def to_dict(self) -> dict[str, Any]:
        """As JSON's data, the table by columns; times in seconds, shares of the true step."""
        step_s = self.step.true_s
        return {
            "wall_s": {"predicted": self.predicted_wall_s, "true": self.true_wall_s, "log_ratio": self.wall_log_ratio},
            "step": _phase_dict(self.step, step_s) | {"relative": dataclasses.asdict(self.relative)},
            "ranks": [{"rank": rank} | dataclasses.asdict(spread) for rank, spread in self.by_rank.items()],
            "phases": {phase.name: _phase_dict(phase, step_s) for phase in self.phases},
            "steps": {str(name): column.tolist() for name, column in self.table.items()},
        }


def step_errors(predicted: RunResult, true: RunResult) -> StepErrors:
    """Errors of ``predicted``, whose ranks and counted steps must be those of ``true``."""
    left, right = (_counted(run) for run in (predicted, true))
    assert left.index.equals(right.index), "runs with other ranks or steps have no errors step by step"
    times, true_times = (_part(frame, _ALL) for frame in (left, right))
    error = (times - true_times) / true_times
    table = left.index.to_frame(index=False).assign(predicted_s=times, true_s=true_times, error=error)
    ranks = table["rank"].to_numpy()
    return StepErrors(
        predicted_wall_s=predicted.summary.wall_s,
        true_wall_s=true.summary.wall_s,
        step=_phase("step", _ALL, left, right),
        relative=Spread.of(error),
        by_rank={int(rank): Spread.of(error[ranks == rank]) for rank in np.unique(ranks)},
        phases=tuple(_phase(name, columns, left, right) for name, columns in PHASES.items()),
        table=table,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The A/A noise: what real runs of one experiment differ by, from every pair of them."""

    num_runs: int
    pairs: tuple[StepErrors, ...]

    @classmethod
    def of(cls, runs: Sequence[RunResult]) -> Noise | None:
        """From at least two runs; none of fewer."""
        if len(runs) < 2:
            return None
        return cls(num_runs=len(runs), pairs=tuple(step_errors(a, b) for a, b in itertools.combinations(runs, 2)))

    @property
    def wall_log_ratio(self) -> float:
        """Largest absolute log-ratio of two run times."""
        return max(abs(pair.wall_log_ratio) for pair in self.pairs)

    @property
    def relative(self) -> Spread:
        """Largest of every figure among the pairs' relative step errors."""
        return _largest([pair.relative for pair in self.pairs])

    def phase_s(self, name: str) -> Spread:
        """Largest of every figure among the pairs' errors of a phase, or of the whole ``step``."""
        phases = [phase for pair in self.pairs for phase in (pair.step, *pair.phases)]
        return _largest([phase.error_s for phase in phases if phase.name == name])

    def to_dict(self) -> dict[str, Any]:
        """As JSON's data."""
        return {
            "runs": self.num_runs,
            "pairs": len(self.pairs),
            "wall_log_ratio": self.wall_log_ratio,
            "relative": dataclasses.asdict(self.relative),
            "phases_s": {name: dataclasses.asdict(self.phase_s(name)) for name in ("step", *PHASES)},
        }


def _counted(run: RunResult) -> pd.DataFrame:
    return run.steps[run.steps["step"] >= 1].set_index(["rank", "step"]).sort_index()


def _part(frame: pd.DataFrame, columns: Sequence[str]) -> Array:
    return np.asarray(frame[list(columns)].sum(axis=1), dtype=np.float64)


def _phase(name: str, columns: Sequence[str], left: pd.DataFrame, right: pd.DataFrame) -> Phase:
    predicted, true = _part(left, columns), _part(right, columns)
    return Phase(name=name, predicted_s=float(predicted.mean()), true_s=float(true.mean()), error_s=Spread.of(predicted - true))


def _phase_dict(phase: Phase, step_s: float) -> dict[str, Any]:
    shares = {name: value / step_s for name, value in dataclasses.asdict(phase.error_s).items()}
    return {
        "predicted_s": phase.predicted_s,
        "true_s": phase.true_s,
        "relative_bias": phase.relative_bias,
        "error_s": dataclasses.asdict(phase.error_s),
        "share_of_step": shares,
    }


def _largest(spreads: Sequence[Spread]) -> Spread:
    return Spread(
        bias=max((spread.bias for spread in spreads), key=abs),
        mean_absolute=max(spread.mean_absolute for spread in spreads),
        p95=max(spread.p95 for spread in spreads),
        max=max(spread.max for spread in spreads),
    )
