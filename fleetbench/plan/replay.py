"""Replay: what one role of a run was told, and what it decided; the events, fed to its first state, must give the same operations."""

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
"""``now_ns``, an event, and the operations that it started."""
S = TypeVar("S", bound=State | RoleState)


class Strategy(Protocol[S]):
    """Two functions over plain state; it never decides a collective from ``now_ns``."""

    def init(self, role: Role, rank: int, first_step: int = 1) -> S:
        """The state before the first event."""
        ...

    def on(self, state: S, now_ns: int, event: Event) -> tuple[S, Operations]:
        """What to start now."""
        ...


T = TypeVar("T", bound=Strategy[Any])


@dataclass(slots=True)
class StatefulStrategy(Generic[T, S]):
    """One role with its state, as an executor drives it; keeps a log when asked."""

    strategy: T
    state: S
    log: list[Entry] | None = None
    rank: int = 0
    role: Role = "trainer"
    initial: S = field(init=False)
    """The state that the log starts from."""

    def __post_init__(self) -> None:
        self.initial = self.state

    @classmethod
    def start(
        cls, strategy: T, rank: int, role: Role = "trainer", *, record: bool = False, first_step: int = 1, state: S | None = None
    ) -> Self:
        """A role before its first event, or going on from a saved ``state``; a trainer that warms up has a first step below 1."""
        return cls(strategy, strategy.init(role, rank, first_step) if state is None else state, [] if record else None, rank, role)

    def mark(self) -> tuple[S, int]:
        """Where the role is now, for ``rewind``: its state, and the length of its log."""
        return self.state, len(self.log or ())

    def rewind(self, mark: tuple[S, int]) -> None:
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

    def recording(self) -> Recording:
        """What was told and decided so far."""
        decides: Any = self.strategy
        basis = decides.rules if isinstance(decides, ServerTraining) else decides.plan
        return Recording(basis, self.rank, self.initial, tuple(self.log or ()), self.role)


Decider = StatefulStrategy[CollectiveTraining, State]
"""A trainer among trainers."""
RoleDecider = StatefulStrategy[ServerTraining, RoleState]
"""A trainer, sender or server of parameter servers."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A role's log, with the state that it starts from. Roles of parameter servers follow rules, others a plan."""

    basis: Plan | ServerRules
    rank: int
    initial: State | RoleState
    log: tuple[Entry, ...] = ()
    role: Role = "trainer"

    def replayed(self, strategy: CollectiveTraining | None = None) -> list[Operations]:
        """The operations of the same events, decided again; a plan needs the ``strategy`` that follows it."""
        role: StatefulStrategy[Any, Any] = StatefulStrategy(strategy or ServerTraining(self.basis), self.initial)  # type: ignore[arg-type]  # roles have rules
        return [role.on(now, event) for now, event, _ in self.log]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        entry: dict[str, Any] = {"rank": self.rank, "log": encoded(self.log)}
        if isinstance(self.initial, State):
            assert isinstance(self.basis, Plan)
            return {"plan": self.basis.to_dict(), "initial": self.initial.to_dict(), **entry}
        assert isinstance(self.basis, ServerRules)
        return {"rules": dataclasses.asdict(self.basis), "role": self.role, "initial": self.initial._asdict(), **entry}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recording:
        """The recording that ``to_dict`` wrote."""
        log = decoded(data["log"])
        if "plan" in data:
            return cls(Plan.from_dict(data["plan"]), data["rank"], State.from_dict(data["initial"]), log)
        return cls(ServerRules(**data["rules"]), data["rank"], state_of(data["role"], data["initial"]), log, data["role"])


def in_order(recordings: Iterable[Recording]) -> tuple[Recording, ...]:
    """By role, then by rank."""
    return tuple(sorted(recordings, key=lambda recording: (recording.role, recording.rank)))


def encoded(log: Iterable[Entry]) -> list[dict[str, Any]]:
    """A log as plain data: one mapping an entry, in which the event's fields stand beside its name."""
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
    """What ``encoded`` gave, also through JSON."""
    log = []
    for entry in map(tupled, data):
        now, kind, operations = entry.pop("now_ns"), EVENTS[entry.pop("event")], entry.pop("operations")
        log.append((now, kind(**entry), tuple(Operation(**operation) for operation in operations)))
    return tuple(log)
