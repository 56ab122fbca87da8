"""Replay: the recorded events and decisions of one role in a run.

Handling the same events from the role's initial state must give the same decisions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from fleetbench.plan.build import Plan
from fleetbench.plan.events import EVENTS, Event
from fleetbench.plan.operations import Operation, Operations, tupled
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Role, RoleState, state_of
from fleetbench.plan.servers.training import ServerTraining
from fleetbench.plan.state import State
from fleetbench.plan.training import CollectiveTraining

Entry = tuple[int, Event, Operations]
"""Entry of a log: time in ns, event, and the operations that the event started."""
S = TypeVar("S", bound=State | RoleState)


class Strategy(Protocol[S]):
    """A strategy: two functions over plain state. It never decides a collective from ``now_ns``."""

    def init(self, role: Role, rank: int, first_step: int = 1) -> S:
        """Return the state before the first event."""
        ...

    def on(self, state: S, now_ns: int, event: Event) -> tuple[S, Operations]:
        """Return the new state, and the operations to start now."""
        ...


T = TypeVar("T", bound=Strategy[Any])


@dataclass(slots=True)
class StatefulStrategy(Generic[T, S]):
    """A role's strategy with its current state, for an executor; it keeps a log if requested."""

    strategy: T
    state: S
    log: list[Entry] | None = None
    rank: int = 0
    role: Role = "trainer"
    initial: S = field(init=False)
    """State at the start of the log."""

    def __post_init__(self) -> None:
        self.initial = self.state

    @classmethod
    def start(
        cls, strategy: T, rank: int, role: Role = "trainer", *, record: bool = False, first_step: int = 1, state: S | None = None
    ) -> Self:
        """Create a role before its first event, or continue from a saved ``state``.

        A trainer that warms up has a first step below 1.
        """
        return cls(strategy, strategy.init(role, rank, first_step) if state is None else state, [] if record else None, rank, role)

    def mark(self) -> tuple[S, int]:
        """Return the role's position for ``rewind``: its state, and the length of its log."""
        return self.state, len(self.log or ())

    def rewind(self, mark: tuple[S, int]) -> None:
        """Undo all events since ``mark``, also in the log."""
        self.state, length = mark
        if self.log is not None:
            del self.log[length:]

    def on(self, now_ns: int, event: Event) -> Operations:
        """Handle an event and return the operations to start now."""
        self.state, operations = self.strategy.on(self.state, now_ns, event)
        if self.log is not None:
            self.log.append((now_ns, event, operations))
        return operations

    def recording(self) -> Recording:
        """Return the events and decisions so far."""
        decides: Any = self.strategy
        basis = decides.rules if isinstance(decides, ServerTraining) else decides.plan
        return Recording(basis, self.rank, self.initial, tuple(self.log or ()), self.role)


Decider = StatefulStrategy[CollectiveTraining, State]
"""A trainer in collective training."""
RoleDecider = StatefulStrategy[ServerTraining, RoleState]
"""A trainer, sender or server of parameter servers."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A role's log and initial state. ``basis`` is a plan, or the rules of parameter servers."""

    basis: Plan | ServerRules
    rank: int
    initial: State | RoleState
    log: tuple[Entry, ...] = ()
    role: Role = "trainer"

    def replayed(self, strategy: CollectiveTraining | None = None) -> list[Operations]:
        """Decide each event of the log again, and return the operations; a role with a plan needs its ``strategy``."""
        role: StatefulStrategy[Any, Any] = StatefulStrategy(strategy or ServerTraining(self.basis), self.initial)  # type: ignore[arg-type]  # roles have rules
        return [role.on(now, event) for now, event, _ in self.log]

    def to_dict(self) -> dict[str, Any]:
        """Return the recording as plain data."""
        entry: dict[str, Any] = {"rank": self.rank, "log": encoded(self.log)}
        if isinstance(self.initial, State):
            assert isinstance(self.basis, Plan)
            return {"plan": self.basis.to_dict(), "initial": self.initial.to_dict(), **entry}
        assert isinstance(self.basis, ServerRules)
        return {"rules": dataclasses.asdict(self.basis), "role": self.role, "initial": self.initial._asdict(), **entry}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recording:
        """Read the recording that ``to_dict`` wrote."""
        log = decoded(data["log"])
        if "plan" in data:
            return cls(Plan.from_dict(data["plan"]), data["rank"], State.from_dict(data["initial"]), log)
        return cls(ServerRules(**data["rules"]), data["rank"], state_of(data["role"], data["initial"]), log, data["role"])


def in_order(recordings: Iterable[Recording]) -> tuple[Recording, ...]:
    """Return the recordings sorted by role, then by rank."""
    return tuple(sorted(recordings, key=lambda recording: (recording.role, recording.rank)))


def encoded(log: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return a log as plain data: one mapping per entry, with the event's fields next to its name."""
    return [
        {
            "now_ns": now,
            "event": type(event).__name__,
            **dataclasses.asdict(event),
            "operations": [dataclasses.asdict(operation) for operation in operations],
        }
        for now, event, operations in log
    ]


def decoded(data: Iterable[Mapping[str, Any]]) -> tuple[Entry, ...]:
    """Return the log from which ``encoded`` made ``data``, which may have been stored as JSON."""
    log = []
    for entry in map(tupled, data):
        now, kind, operations = entry.pop("now_ns"), EVENTS[entry.pop("event")], entry.pop("operations")
        log.append((now, kind(**entry), tuple(Operation(**operation) for operation in operations)))
    return tuple(log)
