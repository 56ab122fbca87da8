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
        self._of_ranks: list[Span] = []
        self._of_collectives: list[Span] = []

    def add(self, span: Span) -> None:
        """A rank has done something."""
        self._keep(self._of_ranks, [span])

    def carry(self, operation: Operation, ranks: Sequence[int], start_ns: int, end_ns: int) -> None:
        """Ranks have met: a span on each of them."""
        stream = f"{COMMUNICATION} {operation.communicator}" if self._several else COMMUNICATION
        self._keep(self._of_collectives, [Span(rank, stream, collective_name(operation), start_ns, end_ns - start_ns) for rank in ranks])

    def all(self) -> tuple[Span, ...]:
        """Those that are kept: the ranks' own, rank by rank, then collectives."""
        return (*sorted(self._of_ranks, key=lambda span: span.rank), *self._of_collectives)

    def _keep(self, kept: list[Span], spans: Sequence[Span]) -> None:
        self.num += len(spans)
        kept += spans
        if self.num > self._most:
            self._of_ranks.clear()
            self._of_collectives.clear()


def collective_name(operation: Operation) -> str:
    """``all_reduce 3``: the kind, and the bucket or what else is carried."""
    return f"{operation.kind} {operation.payload if operation.bucket is None else operation.bucket}"


def too_many(events: str, most: int) -> str:
    """Why a timeline of so many events is not kept."""
    return f"{events} events, and no more than {most:,} are kept: fewer steps or trainers"
