"""What a short run took, read off its steps and spans.

All durations are seconds. A step's time is a sum, so what enters it is a mean, over ranks and steps,
of which the slowest few in a hundred are left out (``typical``); a median would leave out half of what
makes real steps long.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench.result import RunResult, step_times
from fleetbench.timeline import COMMUNICATION, HOST, Span, start_name

Floats = npt.NDArray[np.float64]

_SLOWEST = 0.02
"""This share of the steps counts as the machine's hiccups."""
_LONGEST_GAP = 0.5
"""Between two collectives of one lane, as a share of the second: what is longer is a wait for the caller."""


def typical(values: npt.ArrayLike) -> float:
    """The mean without the slowest; 0 of nothing."""
    ordered = np.sort(np.asarray(values, dtype=float).ravel())
    return float(ordered[: len(ordered) - int(_SLOWEST * len(ordered))].mean()) if len(ordered) else 0.0


def counted(result: RunResult) -> pd.DataFrame:
    """The steps after the warm-up."""
    return result.steps[result.steps["step"] >= 1]


def closing(result: RunResult) -> pd.DataFrame:
    """The counted steps after which trainers averaged."""
    table = counted(result)
    return table[table["local_steps"].notna()]


def typical_s(result: RunResult, column: str) -> float:
    """Of a column, over ranks and steps."""
    return typical(counted(result)[column].to_numpy())


def compute_times(result: RunResult) -> Floats:
    """Forward and backward by rank and step."""
    table = counted(result)
    compute = table.assign(compute_s=table["forward_s"] + table["backward_s"]).pivot_table(index="rank", columns="step", values="compute_s")
    return np.asarray(compute.to_numpy(), dtype=float)


def exchanges(result: RunResult, steps: pd.DataFrame | None = None) -> Floats:
    """By step, from the last rank's arrival to the exchange's end on the rank where it ends last.

    ``steps``: rows of the result's, by default those after the warm-up.
    Steps follow each other at that pace: who ends last arrives last at the next exchange. A ring over slow and
    fast links ends on some ranks earlier, by a segment's time, and their mean would be too short by that.
    """
    table = counted(result) if steps is None else steps
    return np.asarray(table["exposed_comm_s"].groupby(table["step"]).max().to_numpy(), dtype=float)


def start_times(result: RunResult) -> dict[int, Floats]:
    """Of every bucket, what starting it took, of all ranks and steps."""
    names = {start_name(bucket.id): bucket.id for bucket in result.plan.buckets}
    first = counted(result).groupby("rank")["start_s"].min()
    begin_ns = {int(rank): round(float(start) * 1e9) - 1 for rank, start in first.items()}  # type: ignore[call-overload]  # an index of ints
    found: dict[int, list[float]] = {}
    for span in result.spans:
        if span.stream == HOST and span.name in names and span.start_ns >= begin_ns[span.rank]:
            found.setdefault(names[span.name], []).append(span.duration_ns * 1e-9)
    return {bucket: np.array(times) for bucket, times in found.items()}


def collective_times(averaged: RunResult) -> dict[int, Floats]:
    """Of every bucket, what its all-reduce took of an averaging in which they queue, by rank and averaging.

    From the end of the one before on its lane to its own: what lies between two of them is part of their cost. Not of
    those that began before any on the lane had ended, which queued after nothing. Where an optimizer's state is
    averaged after the parameters, a bucket's first is meant.
    """
    names = {f"all_reduce {bucket.id}": bucket.id for bucket in averaged.plan.buckets}
    found: dict[int, list[float]] = {}
    for spans in _averagings(averaged):
        for lane in {span.stream for span in spans}:
            of_lane = sorted((span for span in spans if span.stream == lane and span.name in names), key=lambda span: span.start_ns)
            ordered = list({span.name: span for span in reversed(of_lane)}.values())[::-1]
            first_end_ns = min((span.start_ns + span.duration_ns for span in ordered), default=0)
            for before, span in pairwise(ordered):
                if span.start_ns < first_end_ns:
                    continue
                gap_ns = max(0, span.start_ns - before.start_ns - before.duration_ns)
                took_ns = span.duration_ns + min(gap_ns, _LONGEST_GAP * span.duration_ns)
                found.setdefault(names[span.name], []).append(took_ns * 1e-9)
    return {bucket: np.array(times) for bucket, times in found.items()}


def _averagings(result: RunResult) -> list[list[Span]]:
    """The collectives of every averaging after the warm-up, by rank and step."""
    spans: dict[int, list[Span]] = {}
    for span in result.spans:
        if span.stream.startswith(COMMUNICATION):
            spans.setdefault(span.rank, []).append(span)
    table = closing(result)
    ends = table["start_s"] + step_times(result.steps).loc[table.index]
    return [
        [span for span in spans.get(int(rank), ()) if start_s * 1e9 - 1 <= span.start_ns <= end_s * 1e9 + 1]
        for rank, start_s, end_s in zip(table["rank"], table["start_s"], ends, strict=True)
    ]
