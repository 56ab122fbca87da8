"""Recording: what one role of a run was told, and what it decided; replayed, the events give the same operations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetbench.plan.events import EVENTS, Event
from fleetbench.plan.operations import Operation, Operations
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Role, RoleState, state_of
from fleetbench.plan.servers.training import ServerTraining

Log = list[tuple[int, Event, Operations]]


@dataclass(slots=True)
class RoleDecider:
    """One role with its state, as an executor drives it; keeps a log when asked."""

    training: ServerTraining
    role: Role
    rank: int
    initial: RoleState
    """What the log starts from."""
    state: RoleState
    log: Log | None = None

    @classmethod
    def start(cls, rules: ServerRules, role: Role, rank: int, *, record: bool = False, state: RoleState | None = None) -> RoleDecider:
        """A role before its first event, or going on from a saved ``state``."""
        training = ServerTraining(rules)
        initial = training.init(role) if state is None else state
        return cls(training, role, rank, initial, initial, [] if record else None)

    def on(self, now_ns: int, event: Event) -> Operations:
        """What to start now."""
        self.state, operations = self.training.on(self.state, now_ns, event)
        if self.log is not None:
            self.log.append((now_ns, event, operations))
        return operations

    def recording(self) -> RoleRecording:
        """What was heard and decided so far."""
        return RoleRecording(self.training.rules, self.role, self.rank, self.initial, tuple(self.log or ()))


@dataclass(frozen=True, slots=True)
class RoleRecording:
    """A role's log, with the state that it starts from."""

    rules: ServerRules
    role: Role
    rank: int
    initial: RoleState
    log: tuple[tuple[int, Event, Operations], ...] = field(default=())

    def replayed(self) -> list[Operations]:
        """The operations of the same events, decided anew."""
        decider = RoleDecider.start(self.rules, self.role, self.rank, state=self.initial)
        return [decider.on(now, event) for now, event, _ in self.log]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        entries = [
            {
                "now_ns": now,
                "event": type(event).__name__,
                "fields": dataclasses.asdict(event),
                "operations": [dataclasses.asdict(operation) for operation in operations],
            }
            for now, event, operations in self.log
        ]
        header = {"rules": dataclasses.asdict(self.rules), "role": self.role, "rank": self.rank, "initial": self.initial._asdict()}
        return {**header, "log": entries}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RoleRecording:
        """The recording that ``to_dict`` wrote."""
        log = []
        for entry in data["log"]:
            fields: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in entry["fields"].items()}
            decided = tuple(Operation(**{**item, "after": tuple(item["after"])}) for item in entry["operations"])
            log.append((entry["now_ns"], EVENTS[entry["event"]](**fields), decided))
        return cls(ServerRules(**data["rules"]), data["role"], data["rank"], state_of(data["role"], data["initial"]), tuple(log))

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps(self.to_dict()), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> RoleRecording:
        """Read what ``save`` wrote."""
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))


def in_order(recordings: Iterable[RoleRecording]) -> tuple[RoleRecording, ...]:
    """By role, then by rank."""
    return tuple(sorted(recordings, key=lambda recording: (recording.role, recording.rank)))
