"""Comparison of two runs: all keys of their summaries, the quantiles of their step times, and their plans."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fleetbench import units
from fleetbench.config import flat
from fleetbench.result import RunResult, step_times
from fleetbench.staleness import total_variation

QUANTILES = (1, 5, 25, 50, 75, 95, 99)
"""Quantiles of the counted steps of all ranks, in per cent."""

_HISTOGRAM = "staleness_histogram"
_NAMES = frozenset({"schema", "seed"})
"""Keys of numbers whose ratio has no meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Values of one quantity in runs A and B.

    ``ratio`` is ``b / a``. It is None for names, and if ``a`` is 0 or a value is missing.
    """

    key: str
    a: Any
    b: Any
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of two runs, A and B."""

    a: str
    """Name of A: its folder's name, or its run id."""
    b: str
    """Name of B: its folder's name, or its run id."""
    rows: tuple[Row, ...]
    """Quantities of both runs."""
    same_plan: bool
    """Whether the plans are equal."""
    step_difference: float
    """Mean step time of B over that of A, minus 1."""
    staleness_variation: float | None = None
    """Total variation distance between the two histograms of staleness; None if a run has no histogram."""

    def text(self) -> str:
        """Return a plain-text table of the quantities that at least one run has."""
        rows = [row for row in self.rows if row.a is not None or row.b is not None]
        spelled = ((units.number(row.a), units.number(row.b), "" if row.ratio is None else units.ratio(row.ratio)) for row in rows)
        cells = [[f" {cell}" for cell in row] for row in spelled]  # pandas leaves one space between columns
        lines = [f"A = {self.a}", f"B = {self.b}"]
        lines += pd.DataFrame(cells, index=[row.key for row in rows], columns=[" A", " B", " B / A"]).to_string().splitlines()
        lines.append(f"plans: {'equal' if self.same_plan else 'different'}")
        if self.staleness_variation is not None:
            lines.append(f"staleness: a total variation of {self.staleness_variation:.3f} between the histograms")
        return "\n".join(line.rstrip() for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON data."""
        return dataclasses.asdict(self)


def compare_runs(a: RunResult, b: RunResult) -> Comparison:
    """Compare two runs of any executors."""
    left, right = _quantities(a), _quantities(b)
    keys = [*left, *(key for key in right if key not in left)]
    ages: list[Any] = [(run.summary.server_load or {}).get(_HISTOGRAM) for run in (a, b)]
    return Comparison(
        a=_name(a),
        b=_name(b),
        rows=tuple(_row(key, left.get(key), right.get(key)) for key in keys),
        same_plan=a.plan.digest == b.plan.digest,
        step_difference=b.summary.step_s["mean"] / a.summary.step_s["mean"] - 1.0,
        staleness_variation=total_variation(*ages) if all(ages) else None,
    )


def _row(key: str, a: Any, b: Any) -> Row:
    known = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b)) and key not in _NAMES
    return Row(key=key, a=a, b=b, ratio=b / a if known and a != 0 else None)


def _quantities(run: RunResult) -> dict[str, Any]:
    summary = dataclasses.asdict(run.summary)
    if summary["server_load"] is not None:  # one figure of both runs says more than a row for each age
        summary["server_load"] = {name: value for name, value in summary["server_load"].items() if name != _HISTOGRAM}
    summary["skipped"] = ", ".join(entry["what"] for entry in run.summary.skipped) or None
    times = step_times(run.steps)
    quantiles = {f"steps.q{q}_s": float(times.quantile(q / 100)) for q in QUANTILES}
    return dict(flat(summary)) | quantiles | {"plan": run.plan.digest}


def _name(run: RunResult) -> str:
    return run.summary.run_id if run.path is None else run.path.name
