"""Execution of a simulated job with parameter servers on SimPy's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleetbench.plan.events import Message
from fleetbench.plan.replay import Recording, RoleDecider
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Role
from fleetbench.plan.servers.training import ServerTraining
from fleetbench.result import StepRecord
from fleetbench.timeline import Span
from sim.clock import Clock
from sim.servers.actor import Carried, Job
from sim.servers.load import Load
from sim.servers.server import Server
from sim.servers.wires import Wires
from sim.servers.worker import Memory, Sender, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What was seen."""

    records: tuple[StepRecord, ...]
    spans: tuple[Span, ...]
    loads: tuple[Load, ...]
    """Of every server, from the first counted step on."""
    recordings: tuple[Recording, ...]


def execute(job: Job, *, record: bool = False, step_done: Callable[[], None] | None = None) -> Execution:
    """Run all trainers to their last step, and the servers until all have left.

    All have joined before the clock starts. ``step_done`` is called at every end of a step of rank 0.
    """
    clock = Clock()
    run = _Run(clock, job, record=record)
    if step_done is not None:
        run.trainers[0].step_done = step_done
    for rank, trainer in enumerate(run.trainers):
        trainer.run(job.draws[rank])
    clock.run()
    waiting = [trainer.decider.rank for trainer in run.trainers if trainer.ended_ns is None]
    assert not waiting, f"trainers {waiting} wait for ever"
    end_ns = max(trainer.records[-1].end_ns for trainer in run.trainers)
    for server in run.servers:
        server.load.count(0, max(end_ns, server.load.until_ns))
    return Execution(
        records=tuple(found for trainer in run.trainers for found in trainer.records),
        spans=tuple(span for actors in (run.trainers, run.servers) for actor in actors for span in actor.spans),
        loads=tuple(server.load for server in run.servers),
        recordings=tuple(decider.recording() for decider in run.deciders if record),
    )


class _Run:
    """The actors of a job, tied together."""

    def __init__(self, clock: Clock, job: Job, *, record: bool) -> None:
        rules = job.rules
        self._clock = clock
        self._job = job
        self._wires = Wires(clock, job.hosts)
        self._counts = False
        self.deciders: list[RoleDecider] = []
        self.servers = [Server(clock, self._decider("server", number, record), job, self._answer) for number in range(rules.servers)]
        _join(self.servers, rules)
        memories = [Memory(versions=(0,) * rules.servers, computed_from=(0,) * rules.servers) for _ in range(rules.trainers)]
        self.senders = [Sender(clock, self._decider("sender", rank, record), job, memory) for rank, memory in enumerate(memories)]
        self.trainers = [Trainer(clock, self._decider("trainer", rank, record), job, memory) for rank, memory in enumerate(memories)]
        for trainer, sender in zip(self.trainers, self.senders, strict=True):
            trainer.post = sender.post = self._post
            trainer.tell_sender = self._local(sender)
            sender.tell_trainer = self._local(trainer)
            trainer.step_begins = self._step_begins

    def _decider(self, role: Role, rank: int, record: bool) -> RoleDecider:
        decider = RoleDecider.start(ServerTraining(self._job.rules), rank, role, record=record)
        self.deciders.append(decider)
        return decider

    def _local(self, to: Sender | Trainer) -> Callable[[Message], None]:
        return lambda message: self._wires.at_once(lambda: to.hear(message))

    def _post(self, role: str, rank: int, server: int, message: Message, carried: Carried) -> None:
        source, target = self._job.hosts.trainers[rank], self._job.hosts.servers[server]
        self.trainers[rank].sent(carried.nbytes)
        self._wires.send((role, rank, server), source, target, carried.nbytes, lambda: self.servers[server].hear(message, carried))

    def _answer(self, role: str, rank: int, server: int, message: Message, carried: Carried) -> None:
        source, target = self._job.hosts.servers[server], self._job.hosts.trainers[rank]
        to: Sender | Trainer = self.trainers[rank] if role == "trainer" else self.senders[rank]
        self._wires.send(("server", server, role, rank), source, target, carried.nbytes, lambda: to.hear(message, carried))

    def _step_begins(self, step: int) -> None:
        if step >= 1 and not self._counts:
            self._counts = True
            for server in self.servers:
                server.load.restart(self._clock.now)


def _join(servers: Sequence[Server], rules: ServerRules) -> None:
    """All trainers are known, and the parameters are there, before the clock starts; what is answered to that takes no time."""
    for server in servers:
        for rank in range(rules.trainers):
            server.decider.on(0, Message("sender", rank, "join"))
        server.decider.on(0, Message("sender", 0, "initial"))
