"""Collect: what the ranks of a leg wrote, on one clock.

Rank 0's clock counts: it stands still while rank 0 pauses (to copy its parameters for an
evaluation), and starts with the first step of any rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fleetbench.declared import first_hit
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan
from fleetbench.plan.replay import Recording, in_order
from fleetbench.result import Outcome, RunResult, StepRecord, summarise
from fleetbench.timeline import COMMUNICATION, COMPUTE, HOST, Span
from real.engine.stopwatch import TimedSpan, TimedStep


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part file."""

    steps: tuple[TimedStep, ...]
    spans: tuple[TimedSpan, ...]
    held_out: tuple[tuple[int, float], ...]
    """``(step, loss)`` of every evaluation."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankPart:
        """Decode a part file."""
        return cls(
            tuple(TimedStep(StepRecord(**step["record"]), step["paused_ns"]) for step in data["steps"]),
            tuple(TimedSpan(**span) for span in data["spans"]),
            tuple((step, loss) for step, loss in data["held_out"]),
        )


@dataclass(frozen=True, slots=True)
class Collected:
    """A leg's steps and spans on rank 0's clock, from 0."""

    records: list[StepRecord]
    spans: tuple[Span, ...]
    time_to_target_s: float | None
    host_s: float


def collect(parts: Sequence[RankPart], target_loss: float | None) -> Collected:
    """Put all ranks on rank 0's clock; ``parts`` in rank order."""
    origin = min(part.steps[0].record.start_ns for part in parts)
    shift: dict[int, int] = {}
    paused = 0
    for timed in parts[0].steps:
        shift[timed.record.step] = origin + paused
        paused += timed.paused_ns
    records = [_shifted(timed, shift[timed.record.step]) for part in parts for timed in part.steps]
    several = any(span.communicator for part in parts for span in part.spans)
    spans = [_span(rank, span, shift[span.step], several=several) for rank, part in enumerate(parts) for span in part.spans]
    last = max(timed.record.end_ns for part in parts for timed in part.steps)
    return Collected(records, tuple(spans), _time_to_target(parts[0].held_out, target_loss, records), (last - origin) * 1e-9)


def result_of(
    experiment: Experiment,
    parts: Sequence[Mapping[str, Any]],
    collected: Collected,
    table: pd.DataFrame,
    outcome: Outcome,
    reports: Sequence[Mapping[str, Any]] = (),
) -> RunResult:
    """The run of a leg; ``parts`` are what its ranks wrote, ``reports`` its servers, and ``table`` is of the collected records."""
    return RunResult(
        experiment=experiment,
        summary=summarise(experiment, table, outcome),
        steps=table,
        plan=Plan.from_dict(parts[0]["plan"]),
        spans=collected.spans,
        recordings=in_order(
            [
                *(Recording.from_dict(part["recording"]) for part in parts if part["recording"]),
                *(Recording.from_dict(role) for part in (*parts, *reports) for role in part.get("roles", ())),
            ]
        ),
        host_s=collected.host_s,
    )


def _shifted(timed: TimedStep, shift: int) -> StepRecord:
    record = timed.record
    return dataclasses.replace(
        record,
        start_ns=record.start_ns - shift,
        end_ns=record.end_ns - shift - timed.paused_ns,
        arrival_ns=None if record.arrival_ns is None else record.arrival_ns - shift,
    )


def _span(rank: int, span: TimedSpan, shift: int, *, several: bool) -> Span:
    stream = HOST if span.is_host else COMPUTE
    if span.communicator is not None:
        stream = f"{COMMUNICATION} {span.communicator}" if several else COMMUNICATION
    return Span(rank, stream, span.name, span.start_ns - shift, span.end_ns - span.start_ns)


def _time_to_target(held_out: Sequence[tuple[int, float]], target: float | None, records: Sequence[StepRecord]) -> float | None:
    """Seconds from the first counted start to the end, on the last rank, of the step that first hit the target."""
    if target is None:
        return None
    step = first_hit([loss <= target for _, loss in held_out])
    if step is None:
        return None
    reached = held_out[step][0]
    begin = min(record.start_ns for record in records if record.step >= 1)
    return (max(record.end_ns for record in records if record.step == reached) - begin) * 1e-9
