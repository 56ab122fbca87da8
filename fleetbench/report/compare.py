"""Comparison of two runs: all keys of their summaries, and their plans."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from fleetbench import units
from fleetbench.config import flat
from fleetbench.result import RunResult
from fleetbench.staleness import total_variation

_HISTOGRAM = "staleness_histogram"
_NAMES = frozenset({"schema", "seed"})
"""Keys of numbers whose ratio has no meaning."""


class Row(NamedTuple):
    """Values of one quantity in runs A and B; ``ratio`` is ``b / a``, or None if it has no meaning."""

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
        rows = [row for row in self.rows if (row.a, row.b) != (None, None)]
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
        return dataclasses.asdict(self) | {"rows": [row._asdict() for row in self.rows]}


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
    return Row(key, a, b, b / a if known and a != 0 else None)


def _quantities(run: RunResult) -> dict[str, Any]:
    summary = dataclasses.asdict(run.summary)
    if summary["server_load"] is not None:  # one figure of both runs says more than a row for each age
        summary["server_load"] = {name: value for name, value in summary["server_load"].items() if name != _HISTOGRAM}
    summary["skipped"] = ", ".join(entry["what"] for entry in run.summary.skipped) or None
    return dict(flat(summary)) | {"plan": run.plan.digest}


def _name(run: RunResult) -> str:
    return run.summary.run_id if run.path is None else run.path.name
