"""Server: a shard of the parameters, a queue of what trainers want of it, and what was seen of both."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fleetbench.plan.events import Event, Message
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.plan.servers.states import ServerState
from fleetbench.staleness import ServerLoad, counts_of, load_of, quantiles_of
from fleetbench.timeline import Span
from sim.clock import Clock
from sim.servers.actor import NOTHING, Actor, Answer, Carried, Job
from sim.servers.traffic import Part

SERVER = "server"
"""The stream of a server's work; its rank in a timeline stands after the trainers'."""
_PUSHES = ("gradient", "delta")


class Server(Actor):
    """One server. It works on one message at a time, in the order in which they arrive."""

    def __init__(self, clock: Clock, decider: RoleDecider, job: Job, answer: Answer) -> None:
        super().__init__(clock, decider, job)
        self.load = Load()
        self._answer = answer
        self._carried = NOTHING
        """By the message that is worked on."""
        self._arrived_nbytes = 0
        """Bytes of the gradients of a round."""
        self._changed: list[list[Part]] = [[] for _ in range(job.rules.trainers)]
        self._in_work = False

    @property
    def state(self) -> ServerState:
        """State of the server's role."""
        state = self.decider.state
        assert isinstance(state, ServerState)
        return state

    def _count(self, more: int) -> None:
        self.load.count(more, self._clock.now)

    def _begin(self, event: Event, carried: Carried, since_ns: int) -> None:
        self._leave()
        self._in_work, self._carried = True, carried
        self.load.waits_ns.append(self._clock.now - since_ns)
        if isinstance(event, Message) and event.kind in _PUSHES:
            for version in carried.versions:
                self.load.staleness[self.state.version - version] += 1
            if self._job.rules.mode == "synchronous":
                self._arrived_nbytes += carried.nbytes

    def _leave(self) -> None:
        """The message that was worked on has left the queue."""
        if self._in_work:
            self._count(-1)
            self._in_work = False

    def _idle(self) -> None:
        self._leave()

    def _nbytes(self, operation: Operation) -> int:
        if operation.kind in ("update", "accumulate"):
            return self._arrived_nbytes if operation.rank is None else self._carried.nbytes
        if operation.kind == "send" and operation.payload == "parameters":
            assert operation.rank is not None
            return self._job.traffic.pushed(self.decider.rank, self._changed[operation.rank])
        if operation.kind == "send" and operation.payload == "rows":
            return self._carried.answer_nbytes
        return self._job.traffic.header_bytes

    def _do(self, operation: Operation) -> None:
        if operation.kind == "send":
            assert operation.rank is not None
            assert operation.message is not None
            nbytes = self._nbytes(operation)
            if operation.payload == "parameters":
                self._changed[operation.rank] = []
            message = Message("server", self.decider.rank, operation.message, count=operation.count, version=self.state.version)
            role = "trainer" if operation.group == "trainer" else "sender"
            self._answer(role, operation.rank, message, Carried(nbytes))
        elif operation.kind == "update" and operation.rank is None:
            self._arrived_nbytes = 0
        elif operation.kind == "mark":
            for rank, changed in enumerate(self._changed):
                if rank != operation.rank:
                    changed.append(self._carried.part)
        if self._took_ns:
            rank = len(self._job.draws) + self.decider.rank
            name = operation.kind if operation.message is None else operation.message
            self.spans.append(Span(rank, SERVER, name, self._clock.now - self._took_ns, self._took_ns))


@dataclass(slots=True)
class Load:
    """One server, from ``since_ns`` on. The queue is what waits and what is worked on."""

    since_ns: int = 0
    until_ns: int = 0
    busy_ns: int = 0
    length: int = 0
    longest: int = 0
    length_ns: int = 0
    """Integral of the queue's length over time."""
    waits_ns: list[int] = field(default_factory=list)
    """Nanoseconds from each message's arrival until the server hears it."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Gradients, or GeoSGD's pushes, by the number of updates between the parameters that they came from and their own."""

    @property
    def told(self) -> ServerLoad:
        """The part of the load that a real server reports, too."""
        return ServerLoad(span_s=(self.until_ns - self.since_ns) / 1e9, busy_s=self.busy_ns / 1e9, staleness=self.staleness)

    def count(self, more: int, now_ns: int) -> None:
        """The queue changes."""
        passed_ns = now_ns - self.until_ns
        self.length_ns += self.length * passed_ns
        self.busy_ns += passed_ns if self.length else 0
        self.until_ns = now_ns
        self.length += more
        self.longest = max(self.longest, self.length)

    def restart(self, now_ns: int) -> None:
        """Forget all before now but the queue."""
        self.since_ns = self.until_ns = now_ns
        self.busy_ns = self.length_ns = 0
        self.longest = self.length
        self.waits_ns.clear()
        self.staleness.clear()


def staleness_summary(loads: Sequence[Load]) -> dict[str, float] | None:
    """``quantiles_of`` the pushes of all servers."""
    return quantiles_of(counts_of([load.told for load in loads]))


def load_summary(loads: Sequence[Load]) -> dict[str, object]:
    """``load_of`` the servers, and what only a simulated one sees: the length of its queue, and the seconds that a message waits."""
    spans_s = [max(1, load.until_ns - load.since_ns) / 1e9 for load in loads]
    waits = np.concatenate([np.asarray(load.waits_ns, dtype=np.float64) for load in loads]) / 1e9
    return {
        **load_of([load.told for load in loads]),
        "queue_length": {
            "mean": sum(load.length_ns / 1e9 / span for load, span in zip(loads, spans_s, strict=True)) / len(loads),
            "max": max(load.longest for load in loads),
        },
        "wait_s": {"mean": float(waits.mean()), "p95": float(np.quantile(waits, 0.95)), "max": float(waits.max())} if len(waits) else None,
    }
