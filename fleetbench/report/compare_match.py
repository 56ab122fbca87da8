"""Whether two runs may be compared step by step, and what differs between them.

Runs of one experiment meet the same batches, the same decisions and the same draws of every
straggler, so that step 7 of one is step 7 of the other. What the simulator believes of links, where
processes were started, and names may differ, and are said; anything else makes other steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from fleetbench.config import encode
from fleetbench.report import units
from fleetbench.result import RunResult

_BELIEFS = frozenset(
    {"name", "workload.profile", "workload.target_loss", "workload.eval_every"}
    | {f"run.{name}" for name in ("launcher", "port", "startup_timeout", "timeout")}
    | {f"cluster.{name}" for name in ("nics_per_node", "cores_per_node", "node_overrides", "collective")}
)
_BELIEVED_TABLES = ("tune.", "run.environment.", "cluster.intra.", "cluster.inter.", "cluster.racks.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which two runs differ."""

    key: str
    a: Any
    b: Any
    other_steps: bool
    """Step by step, the runs did not do the same."""

    def text(self) -> str:
        """In one line."""
        return f"{self.key}: {units.number(self.a)} against {units.number(self.b)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Two runs, as far as they are of one experiment."""

    differences: tuple[Difference, ...]
    """What makes other steps comes first."""

    @property
    def comparable(self) -> bool:
        """Whether step n of rank r of one is step n of rank r of the other."""
        return not any(difference.other_steps for difference in self.differences)


def match(a: RunResult, b: RunResult) -> Match:
    """Find all differences of two runs' experiments, ranks and steps."""
    found = _of_experiments(a, b)
    ranks, steps = ((_spans(a, column), _spans(b, column)) for column in ("rank", "step"))
    same = a.summary.trainers == b.summary.trainers and not _keys(a).symmetric_difference(_keys(b)).size
    if not same or _keys(a).has_duplicates or _keys(b).has_duplicates:
        spans = (("ranks", *ranks), ("counted steps", *steps))
        different = [span for span in spans if span[1] != span[2]] or spans
        found += [Difference(key=key, a=left, b=right, other_steps=True) for key, left, right in different]
    if a.plan.digest != b.plan.digest:
        found.append(Difference(key="plan", a=_plan(a), b=_plan(b), other_steps=False))
    return Match(differences=tuple(sorted(found, key=lambda difference: not difference.other_steps)))


def _of_experiments(a: RunResult, b: RunResult) -> list[Difference]:
    left, right = (dict(units.flat(encode(run.experiment))) for run in (a, b))
    found = [
        Difference(key=key, a=left.get(key), b=right.get(key), other_steps=not _is_belief(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]
    if not found and a.summary.experiment != b.summary.experiment:  # the digest also covers what the named files hold
        key = "contents of a file that the experiment names"
        found.append(Difference(key=key, a=a.summary.experiment, b=b.summary.experiment, other_steps=False))
    return found


def _is_belief(key: str) -> bool:
    return key in _BELIEFS or key.startswith(_BELIEVED_TABLES)


def _keys(run: RunResult) -> pd.MultiIndex:
    counted = run.steps[run.steps["step"] >= 1]
    return pd.MultiIndex.from_frame(counted[["rank", "step"]])


def _spans(run: RunResult, column: str) -> str:
    """Which numbers a column holds: ``0 to 3``, and how many where some are left out."""
    values = run.steps.loc[run.steps["step"] >= 1, column]
    if values.empty:
        return "none"
    first, last, num = int(values.min()), int(values.max()), int(values.nunique())
    return f"{first} to {last}" + ("" if num == last - first + 1 else f", {num} of them")


def _plan(run: RunResult) -> str:
    return f"{len(run.plan.buckets)} buckets ({run.plan.digest[:8]})"
