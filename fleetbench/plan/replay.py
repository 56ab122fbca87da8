"""Replay: a recorded run's events, fed to a fresh state, must give the recorded operations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetbench.plan.build import Plan
from fleetbench.plan.events import EVENTS, Event
from fleetbench.plan.operations import Operation, Operations
from fleetbench.plan.protocol import State, Strategy


@dataclass(slots=True)
class Decider:
    """A strategy with its state, as an executor drives it; keeps a log when asked.

    ``log`` holds ``(now_ns, event, operations)`` of every call, or is none.
    """

    strategy: Strategy
    state: State
    log: list[tuple[int, Event, Operations]] | None = None

    @classmethod
    def start(cls, strategy: Strategy, rank: int, *, record: bool = False) -> Decider:
        """A trainer before its first step."""
        return cls(strategy, strategy.init("trainer", rank), [] if record else None)

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
    log: tuple[tuple[int, Event, Operations], ...] = field(default=())

    def save(self, path: Path) -> None:
        """Write JSON."""
        entries = [
            {"now_ns": now, "event": type(event).__name__, **dataclasses.asdict(event), "operations": [dataclasses.asdict(op) for op in ops]}
            for now, event, ops in self.log
        ]
        header = {"plan": self.plan.to_dict(), "rank": self.rank, "initial": self.initial.to_dict()}
        path.write_text(json.dumps({**header, "log": entries}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what ``save`` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        log = []
        for entry in data["log"]:
            now, name, operations = entry.pop("now_ns"), entry.pop("event"), entry.pop("operations")
            event = EVENTS[name](**{key: tuple(item) if isinstance(item, list) else item for key, item in entry.items()})
            log.append((now, event, tuple(Operation(**{**item, "after": tuple(item["after"])}) for item in operations)))
        return cls(Plan.from_dict(data["plan"]), data["rank"], State.from_dict(data["initial"]), tuple(log))


def replay(strategy: Strategy, initial: State, events: Sequence[tuple[int, Event]]) -> list[Operations]:
    """Feed events to a state; one tuple of operations an event."""
    decider = Decider(strategy, initial)
    return [decider.on(now, event) for now, event in events]
