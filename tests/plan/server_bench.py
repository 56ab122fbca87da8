"""A job of parameter servers in one process: roles, exact fractions for parameters, and messages in whatever order the caller picks."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from fleetbench.plan.events import BackwardEnd, DataEnd, Event, Message, StepBegin, TimerFired
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.training import ServerTraining

Rows = dict[int, Fraction]
"""A row has one number here. Rows below 0 stand for dense parameters: they are in every push and pull."""


@dataclass
class Trainer:
    """A trainer's memory, and its sender's."""

    steps: deque[Rows]
    """What each step's gradient is, or in GeoSGD what the step changes; the dense rows are among them."""
    latest: Rows
    old: Rows
    queue: deque[Rows] = field(default_factory=deque)
    touched: set[int] = field(default_factory=set)
    staged: Rows = field(default_factory=dict)
    received: list[Rows] = field(default_factory=list)
    read: list[Rows] = field(default_factory=list)
    computed_from: int = 0
    has_timer: bool = False
    ended: bool = False
    most_queued: int = 0


@dataclass
class Server:
    """A server's memory: plain SGD with a learning rate of 1."""

    rows: Rows
    changed: dict[int, set[int]]
    arrived: dict[int, Rows] = field(default_factory=dict)
    pushed: deque[Rows] = field(default_factory=deque)
    updates: int = 0
    stopped: int | None = None
    is_stopped: bool = False
    dropped: list[int] = field(default_factory=list)


def dice(seed: int) -> random.Random:
    """Chance that comes out the same every time."""
    return random.Random(seed)  # noqa: S311  # no secret


def is_dense(row: int) -> bool:
    """Whether a row stands for a dense parameter."""
    return row < 0


class Bench:
    """Trainers, senders and servers. ``channels`` hold messages under way, in order; ``deliver`` passes one on."""

    def __init__(self, rules: ServerRules, initial: Rows, steps: Sequence[Sequence[Mapping[int, Fraction]]]) -> None:
        self.rules = rules
        self.initial = dict(initial)
        self.trainers = [Trainer(deque(dict(step) for step in own), dict(initial), dict(initial)) for own in steps]
        self.servers = [
            Server(
                {row: value for row, value in initial.items() if row % rules.servers == number},
                {rank: set() for rank in range(rules.trainers)},
            )
            for number in range(rules.servers)
        ]
        self.roles = {
            (role, rank): RoleDecider.start(ServerTraining(rules), rank, role, record=True)
            for role, num in (("trainer", rules.trainers), ("sender", rules.trainers), ("server", rules.servers))
            for rank in range(num)
        }
        self.channels: dict[tuple[tuple[str, int], tuple[str, int]], deque[tuple[Message, Rows]]] = {}
        self.deltas: list[Rows] = []
        self.merged: Counter[int] = Counter()
        for server in range(rules.servers):
            for rank in range(rules.trainers):
                self.tell("server", server, Message("sender", rank, "join"))
            self.tell("server", server, Message("sender", 0, "initial"))
        self.channels.clear()  # what was answered to those

    # What may happen next

    def choices(self) -> list[tuple[str, Any]]:
        """All that may happen next: a message arrives, a trainer goes on, a timer runs out."""
        found: list[tuple[str, Any]] = [("deliver", key) for key, channel in sorted(self.channels.items()) if channel]
        for rank, trainer in enumerate(self.trainers):
            state = self.roles["trainer", rank].state
            if not trainer.ended and state.waits is None and not state.in_step:  # type: ignore[union-attr]  # a trainer's
                found.append(("step", rank))
            if trainer.has_timer:
                found.append(("timer", rank))
        return found

    def happen(self, choice: tuple[str, Any]) -> None:
        """Let one of ``choices`` happen."""
        kind, what = choice
        if kind == "deliver":
            self.deliver(*what)
        elif kind == "step":
            self.step(what)
        else:
            self.trainers[what].has_timer = False
            self.tell("sender", what, TimerFired())

    def run(self, chance: random.Random, *, ends: bool = True) -> None:
        """Let things happen in random order until nothing can; without ``ends``, until nothing can but the end of training."""
        while choices := [choice for choice in self.choices() if ends or choice[0] != "step" or self.trainers[choice[1]].steps]:
            self.happen(chance.choice(choices))

    def settle(self) -> None:
        """Deliver everything, in one order, without new steps or timers."""
        while choices := [choice for choice in self.choices() if choice[0] == "deliver"]:
            self.happen(choices[0])

    def step(self, rank: int) -> None:
        """Trainer ``rank`` makes its next step, or ends."""
        trainer = self.trainers[rank]
        if not trainer.steps:
            trainer.ended = True
            self.tell("trainer", rank, DataEnd())
            return
        self.tell("trainer", rank, StepBegin(1))
        self.tell("trainer", rank, BackwardEnd())

    def deliver(self, source: tuple[str, int], target: tuple[str, int]) -> None:
        """The oldest message from ``source`` arrives at ``target``."""
        message, rows = self.channels[source, target].popleft()
        role, rank = target
        if role == "server":
            if message.kind == "gradient" and self.rules.mode == "synchronous":
                self.servers[rank].arrived[message.rank] = rows
            elif message.kind in ("gradient", "delta"):
                self.servers[rank].pushed.append(rows)
        elif message.kind in ("parameters", "rows"):
            self.trainers[rank].received.append(rows)
            self.trainers[rank].computed_from = message.version
        self.tell(role, rank, message)

    def tell(self, role: str, rank: int, event: Event) -> None:
        """A role hears of an event, and what it decides is done."""
        for operation in self.roles[role, rank].on(0, event):
            getattr(self, f"_{role}")(rank, operation)

    # What operations do

    def _send(self, source: tuple[str, int], target: tuple[str, int], operation: Operation, rows: Rows, version: int = 0) -> None:
        assert operation.message is not None
        message = Message(source[0], source[1], operation.message, count=operation.count, version=version)
        self.channels.setdefault((source, target), deque()).append((message, rows))

    def _shard(self, rows: Rows, server: int) -> Rows:
        return {row: value for row, value in rows.items() if row % self.rules.servers == server}

    def _trainer(self, rank: int, operation: Operation) -> None:
        trainer = self.trainers[rank]
        if operation.kind == "send" and operation.group == "sender":
            if operation.message == "gradient":
                trainer.queue.append(trainer.steps.popleft())
            trainer.most_queued = max(trainer.most_queued, self.roles["trainer", rank].state.queued)  # type: ignore[union-attr]  # a trainer's
            self._send(("trainer", rank), ("sender", rank), operation, {})
        elif operation.kind == "send":
            for server in range(self.rules.servers):
                self._send(("trainer", rank), ("server", server), operation, {})
        elif operation.kind == "update":
            self._last = trainer.steps.popleft()
            for row, change in self._last.items():
                trainer.latest[row] += change
        elif operation.kind == "mark":
            trainer.touched |= set(self._last)
        elif operation.kind == "install":
            trainer.read += [{row: value for part in trainer.received for row, value in part.items()}]
            trainer.received.clear()
        else:
            assert operation.kind in ("wait", "skip"), operation

    def _sender(self, rank: int, operation: Operation) -> None:
        trainer = self.trainers[rank]
        if operation.kind == "set_timer":
            trainer.has_timer = True
        elif operation.kind == "merge" and operation.payload == "gradient":
            taken = [trainer.queue.popleft() for _ in range(operation.count)]
            self.merged[operation.count] += 1
            trainer.staged = {row: sum((g.get(row, Fraction(0)) for g in taken), Fraction(0)) for row in {row for g in taken for row in g}}
        elif operation.kind == "merge":
            rows = trainer.touched | set(filter(is_dense, trainer.latest))
            trainer.staged = {row: (trainer.latest[row] - trainer.old[row]) / operation.divisor for row in rows}
            for row, delta in trainer.staged.items():
                trainer.old[row] += delta
            trainer.touched = set()
            self.deltas.append(trainer.staged)
        elif operation.kind == "send" and operation.group == "servers":
            for server in range(self.rules.servers):
                version = trainer.computed_from
                self._send(("sender", rank), ("server", server), operation, self._shard(trainer.staged, server), version)
        elif operation.kind == "send":
            self._send(("sender", rank), ("trainer", rank), operation, {})
        else:
            assert operation.kind == "install", operation
            for rows in trainer.received:
                for row, value in rows.items():
                    trainer.latest[row] = trainer.latest[row] + value - trainer.old[row] if operation.payload == "delta" else value
                    trainer.old[row] = value
            trainer.received.clear()

    def _server(self, number: int, operation: Operation) -> None:  # noqa: C901, PLR0912  # a branch an operation
        server = self.servers[number]
        if operation.kind == "send":
            assert operation.rank is not None
            rows: Rows = {}
            if operation.payload == "parameters":
                rows = {row: value for row, value in server.rows.items() if is_dense(row) or row in server.changed[operation.rank]}
                server.changed[operation.rank] = set()
            elif operation.payload == "rows":
                rows = {row: value for row, value in server.rows.items() if not is_dense(row)}
            self._send(("server", number), (operation.group, operation.rank), operation, rows, server.updates)
        elif operation.kind == "update":
            server.updates += 1
            pushes = [server.arrived.pop(rank) for rank in sorted(server.arrived)] if operation.rank is None else [server.pushed.popleft()]
            for push in pushes:
                for row, gradient in push.items():
                    server.rows[row] -= gradient / operation.divisor
        elif operation.kind == "accumulate":
            server.updates += 1
            self._pushed = server.pushed.popleft()
            for row, delta in self._pushed.items():
                server.rows[row] += delta
        elif operation.kind == "mark":
            for rank in set(server.changed) - {operation.rank}:
                server.changed[rank] |= set(filter(lambda row: not is_dense(row), self._pushed))
        elif operation.kind == "drop":
            assert operation.rank is not None
            server.dropped.append(operation.rank)
        elif operation.kind == "stop":
            server.stopped, server.is_stopped = operation.rank, True
        else:
            assert operation.kind == "install", operation

    @property
    def held(self) -> Rows:
        """What the servers hold together."""
        return {row: value for server in self.servers for row, value in server.rows.items()}
