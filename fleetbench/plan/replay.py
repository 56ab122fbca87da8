"""Replay: a recorded run's events, fed to a fresh state, must give the recorded operations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbench.plan.build import Plan
from fleetbench.plan.events import Event
from fleetbench.plan.log import Entry, decoded, encoded
from fleetbench.plan.operations import Operations
from fleetbench.plan.protocol import State, Strategy

Mark = tuple[State, int]
"""A state, and how long the log was."""


@dataclass(slots=True)
class Decider:
    """A strategy with its state, as an executor drives it; keeps a log when asked.

    ``log`` holds ``(now_ns, event, operations)`` of every call, or is none.
    """

    strategy: Strategy
    state: State
    log: list[Entry] | None = None

    @classmethod
    def start(cls, strategy: Strategy, rank: int, *, record: bool = False, first_step: int = 1) -> Decider:
        """A trainer before its first step, which has a number below 1 where training warms up."""
        return cls(strategy, strategy.init("trainer", rank, first_step), [] if record else None)

    def mark(self) -> Mark:
        """Where the strategy is now, for ``rewind``."""
        return self.state, len(self.log or ())

    def rewind(self, mark: Mark) -> None:
        """Take back whatever was told since ``mark``; the log forgets it, too."""
        self.state, length = mark
        if self.log is not None:
            del self.log[length:]

    def on(self, now_ns: int, event: Event) -> Operations:
        """What to start now."""
        self.state, operations = self.strategy.on(self.state, now_ns, event)
        if self.log is not None:
            self.log.append((now_ns, event, operations))
        return operations


@dataclass(frozen=True, slots=True)
class Recording:
    """What one rank of a run was told, and what it decided."""

    plan: Plan
    rank: int
    initial: State
    """The state that the log starts from."""
    log: tuple[Entry, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"plan": self.plan.to_dict(), "rank": self.rank, "initial": self.initial.to_dict(), "log": encoded(self.log)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recording:
        """The recording that ``to_dict`` wrote."""
        return cls(Plan.from_dict(data["plan"]), data["rank"], State.from_dict(data["initial"]), decoded(data["log"]))

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps(self.to_dict()), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what ``save`` wrote."""
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))


def replay(strategy: Strategy, initial: State, events: Sequence[tuple[int, Event]]) -> list[Operations]:
    """Feed events to a state; one tuple of operations an event."""
    decider = Decider(strategy, initial)
    return [decider.on(now, event) for now, event in events]
