"""Execution: what an engine saw of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fleetbench.plan.build import Plan
from fleetbench.plan.replay import Recording
from fleetbench.timeline import MOST_EVENTS, Span


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
    """Its name."""
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
