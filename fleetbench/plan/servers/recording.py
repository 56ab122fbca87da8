"""Recording: what one role of a run was told, and what it decided; replayed, the events give the same operations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbench.plan.events import Event
from fleetbench.plan.log import Entry, decoded, encoded
from fleetbench.plan.operations import Operations
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Role, RoleState, state_of
from fleetbench.plan.servers.training import ServerTraining


@dataclass(slots=True)
class RoleDecider:
    """One role with its state, as an executor drives it; keeps a log when asked."""

    training: ServerTraining
    role: Role
    rank: int
    initial: RoleState
    """What the log starts from."""
    state: RoleState
    log: list[Entry] | None = None

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
    log: tuple[Entry, ...] = ()

    def replayed(self) -> list[Operations]:
        """The operations of the same events, decided anew."""
        decider = RoleDecider.start(self.rules, self.role, self.rank, state=self.initial)
        return [decider.on(now, event) for now, event, _ in self.log]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        header = {"rules": dataclasses.asdict(self.rules), "role": self.role, "rank": self.rank, "initial": self.initial._asdict()}
        return {**header, "log": encoded(self.log)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RoleRecording:
        """The recording that ``to_dict`` wrote."""
        rules, state = ServerRules(**data["rules"]), state_of(data["role"], data["initial"])
        return cls(rules, data["role"], data["rank"], state, decoded(data["log"]))

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
