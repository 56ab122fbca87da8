"""Server: a parameter server on the simulated clock."""

from fleetbench.plan.events import Event, Message
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.plan.servers.states import ServerState
from fleetbench.staleness import ServerLoad
from fleetbench.timeline import Span
from sim.clock import Clock
from sim.servers.actor import NOTHING, Actor, Answer, Carried, Job
from sim.servers.traffic import Part

SERVER = "server"
"""Name of the stream of a server's work in a timeline, where servers' ranks follow the trainers'."""
_PUSHES = ("gradient", "delta")


class Server(Actor):
    """One server. It works on one message at a time, in the order in which they arrive."""

    def __init__(self, clock: Clock, decider: RoleDecider, job: Job, answer: Answer) -> None:
        super().__init__(clock, decider, job)
        self.load = ServerLoad()
        self._answer = answer
        self._carried = NOTHING
        """Sizes and versions of the message that the server works on."""
        self._arrived_nbytes = 0
        """Bytes of the gradients that have arrived in a synchronous round."""
        self._changed: list[list[Part]] = [[] for _ in range(job.rules.trainers)]

    @property
    def state(self) -> ServerState:
        """State of the server's role."""
        state = self.decider.state
        assert isinstance(state, ServerState)
        return state

    def _begin(self, event: Event, carried: Carried) -> None:
        self._carried = carried
        if isinstance(event, Message) and event.kind in _PUSHES:
            for version in carried.versions:
                self.load.staleness[self.state.version - version] += 1
            if self._job.rules.mode == "synchronous":
                self._arrived_nbytes += carried.nbytes

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
            self.load.worked(self._took_ns, self._clock.now)
            rank = len(self._job.draws) + self.decider.rank
            name = operation.kind if operation.message is None else operation.message
            self.spans.append(Span(rank, SERVER, name, self._clock.now - self._took_ns, self._took_ns))
