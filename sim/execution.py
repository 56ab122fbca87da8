"""Execution: what an engine saw of a run, and what of it a timeline shows."""

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
    """What of a run is to be kept besides its summary."""

    table: bool = True
    most_spans: int = MOST_EVENTS
    """Where there are more, none is kept; 0 keeps none."""
    recordings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A run as its engine saw it. Times in ns."""

    engine: str
    plan: Plan
    begin_ns: int
    """The first start of a counted step on any rank."""
    end_ns: int
    """The last end on any rank."""
    step_ends_ns: Mapping[int, int]
    """The last end of each step on any rank."""
    table: pd.DataFrame | None
    """A row a rank and step; none where it was not wanted."""
    totals: Mapping[str, Any] | None = None
    """What ``fleetbench.result.summary_of`` reads of the counted steps, where there is no table."""
    spans: tuple[Span, ...] = ()
    no_spans: str | None = None
    """Why there are none, where they were wanted."""
    recordings: tuple[Recording, ...] = ()
    """With parameter servers, every role's; the next three are of servers, too."""
    staleness: dict[str, float] | None = None
    server_load: dict[str, object] | None = None
    notes: tuple[dict[str, str], ...] = ()
    """What it left out."""


class Spans:
    """Counts all spans of a run, and keeps them up to a limit: once there are more, it has none."""

    def __init__(self, most: int, *, several: bool) -> None:
        """``several``: there are several communicators."""
        self.num = 0
        self._most = most
        self._several = several
        self.kept: list[Span] = []

    def add(self, *spans: Span) -> None:
        """Ranks have done something."""
        self.num += len(spans)
        self.kept += spans
        if self.num > self._most:
            self.kept.clear()

    def carry(self, operation: Operation, ranks: Sequence[int], start_ns: int, end_ns: int) -> None:
        """Ranks have met: a span on each of them."""
        names = stream_and_name(operation, several=self._several)
        self.add(*(Span(rank, *names, start_ns, end_ns - start_ns) for rank in ranks))


def stream_and_name(operation: Operation, *, several: bool) -> tuple[str, str]:
    """Of a collective's spans: the stream, of its communicator where there are ``several``; and ``all_reduce 3``, of what is carried."""
    carried = operation.payload if operation.bucket is None else operation.bucket
    return f"{COMMUNICATION} {operation.communicator}" if several else COMMUNICATION, f"{operation.kind} {carried}"


def too_many(events: str, most: int) -> str:
    """Why a timeline of so many events is not kept."""
    return f"{events} events, and no more than {most:,} are kept: fewer steps or trainers"
