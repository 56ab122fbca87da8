"""Execution: the data that an engine returns about a run, and the spans of its timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fleetbench.plan.build import Plan
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import Recording
from fleetbench.timeline import COMMUNICATION, MOST_EVENTS, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Data of a run that an engine keeps in addition to the summary."""

    table: bool = True
    most_spans: int = MOST_EVENTS
    """Largest number of spans to keep. A run with more keeps none; 0 keeps none."""
    recordings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A run as its engine recorded it. Times are in ns."""

    engine: str
    plan: Plan
    begin_ns: int
    """Earliest start of a counted step on any rank."""
    end_ns: int
    """Latest end on any rank."""
    step_ends_ns: Mapping[int, int]
    """Latest end on any rank, by number of the step."""
    table: pd.DataFrame | None
    """One row per rank and step; ``None`` if it was not requested."""
    totals: Mapping[str, Any] | None = None
    """Figures of the counted steps, as ``fleetbench.result.summary_of`` takes them, if there is no table."""
    spans: tuple[Span, ...] = ()
    no_spans: str | None = None
    """Reason why there are no spans although they were requested."""
    recordings: tuple[Recording, ...] = ()
    """Events and operations of every rank, or of every role with parameter servers."""
    staleness: dict[str, float] | None = None
    """Quantiles of staleness; only with parameter servers."""
    server_load: dict[str, object] | None = None
    """Load of the servers; only with parameter servers."""
    notes: tuple[dict[str, str], ...] = ()
    """Notes on parts of the experiment that the engine left out."""


class Spans:
    """Counts all spans of a run, and keeps them up to a limit. Beyond the limit it keeps none."""

    def __init__(self, most: int, *, several: bool) -> None:
        """``several``: whether there are several communicators."""
        self.num = 0
        self._most = most
        self._several = several
        self.kept: list[Span] = []

    def add(self, *spans: Span) -> None:
        """Add spans of any ranks."""
        self.num += len(spans)
        self.kept += spans
        if self.num > self._most:
            self.kept.clear()

    def carry(self, operation: Operation, ranks: Sequence[int], start_ns: int, end_ns: int) -> None:
        """Add the span of a collective on each of its ranks."""
        names = stream_and_name(operation, several=self._several)
        self.add(*(Span(rank, *names, start_ns, end_ns - start_ns) for rank in ranks))


def stream_and_name(operation: Operation, *, several: bool) -> tuple[str, str]:
    """Return the stream and the name of a collective's spans.

    The stream names the communicator if there are ``several``. The name is, for example, ``all_reduce 3`` for
    bucket 3.
    """
    carried = operation.payload if operation.bucket is None else operation.bucket
    return f"{COMMUNICATION} {operation.communicator}" if several else COMMUNICATION, f"{operation.kind} {carried}"


def too_many(events: str, most: int) -> str:
    """Return the reason why a timeline with this number of events is not kept."""
    return f"{events} events, and no more than {most:,} are kept: fewer steps or trainers"
