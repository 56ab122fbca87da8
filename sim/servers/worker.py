"""Worker: a trainer's steps, and its background sender."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import simpy

from fleetbench.plan.events import BackwardEnd, DataEnd, Event, Flush, LookUp, Message, StepBegin, TimerFired
from fleetbench.plan.layers import StepHead
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.plan.servers.states import TrainerState
from fleetbench.result import StepRecord
from fleetbench.stragglers import stretch
from fleetbench.timeline import COMPUTE, Span
from sim.clock import Clock
from sim.servers.actor import Act, Actor, Carried, Job, Post
from sim.servers.traffic import Part

Local = Callable[[Message], None]
"""Function that carries a message between a trainer and its sender."""

Versions = tuple[int, ...]
"""Version of some parameters: the number of updates that each server had made to them."""
Program = Iterator[Event | simpy.Event]
"""Generator of a trainer's steps. It yields an event of the clock to wait for, or an event that is reported
to the strategy, and then waits until the strategy lets the trainer continue."""
_NEWEST = (2**62,)
"""Version of a server from which nothing has been read yet: above all others."""


@dataclass(slots=True)
class Memory:
    """Versions of parameters that a trainer and its sender share."""

    versions: Versions
    """Versions of the parameters that the next step computes with."""
    computed_from: Versions
    """Versions of the oldest parameters that the step under way computes with."""
    queue: deque[Versions] = field(default_factory=deque)
    """For each gradient that the sender has not taken yet, versions of the parameters that it was computed from."""


class Sender(Actor):
    """A trainer's background sender, which merges and pushes gradients, and pulls parameters."""

    def __init__(self, clock: Clock, decider: RoleDecider, job: Job, memory: Memory, post: Post) -> None:
        super().__init__(clock, decider, job)
        self._post = post
        self._memory = memory
        self._timers = 0
        self._received: dict[int, int] = {}
        self._staged: list[Versions] = [memory.versions]
        self._staged_steps: Part = (self.decider.rank, 0, 0)
        self.tell_trainer: Local

    def _begin(self, event: Event, carried: Carried) -> None:  # noqa: ARG002  # ``Actor`` passes it to all
        if isinstance(event, Message) and event.kind == "parameters":
            self._received[event.rank] = event.version

    def _do(self, operation: Operation) -> None:
        if operation.kind == "set_timer":
            self._timers += 1
            number = self._timers
            # ignored if a later ``set_timer`` has replaced it
            self._clock.timeout(operation.delay_ns).callbacks.append(lambda _: self.hear(TimerFired()) if number == self._timers else None)
        elif operation.kind == "merge":
            taken = [self._memory.queue.popleft() for _ in range(operation.count)]
            self._staged = taken if operation.payload == "gradient" else [self._memory.versions]
            rank, first, count = self._staged_steps
            self._staged_steps = rank, first + count, operation.count
        elif operation.kind == "install":
            self._memory.versions = tuple(self._received.get(server, version) for server, version in enumerate(self._memory.versions))
            self._received.clear()
        elif operation.kind == "send":
            self._send(operation)

    def _send(self, operation: Operation) -> None:
        assert operation.message is not None
        rank = self.decider.rank
        if operation.group == "trainer":
            self.tell_trainer(Message("sender", rank, operation.message, count=operation.count))
            return
        traffic = self._job.traffic
        for server in range(self._job.rules.servers):
            carried = Carried(traffic.header_bytes)
            if operation.payload is not None:
                versions = tuple(version[server] for version in self._staged)
                carried = Carried(traffic.pushed(server, [self._staged_steps]), versions, self._staged_steps)
            message = Message("sender", rank, operation.message, count=operation.count, version=min(carried.versions, default=0))
            self._post(server, message, carried)


class Trainer(Actor):
    """Computes one step after the other. It receives messages at any time, and continues when the strategy lets it.

    Its last step ends when all that it has handed to its sender is pushed, and what others changed is pulled.
    """

    def __init__(self, clock: Clock, decider: RoleDecider, job: Job, memory: Memory, post: Post) -> None:
        super().__init__(clock, decider, job)
        self._post = post
        self.records: list[StepRecord] = []
        self.ended_ns: int | None = None
        self._memory = memory
        self._head = StepHead(job.table, job.fetch_every, clock.now)
        self._program: Program
        self._is_ready = False
        """Whether the program is to continue once the strategy lets it."""
        self._bytes_sent = self._update_ns = self._idle_since_ns = 0
        self._index = self._look_up = 0
        """Index of the step under way, and number of its last look-up."""
        self.tell_sender: Local
        self.step_begins: Callable[[int], None] = lambda _: None
        self.step_done: Callable[[], None] = lambda: None

    def sent(self, nbytes: int) -> None:
        """Count ``nbytes`` as sent by this trainer and its sender."""
        self._bytes_sent += nbytes

    def run(self, draws: Sequence[int]) -> None:
        """Train the job's steps; ``draws`` has the X of each in units of 2^-24."""
        self._program = self._train(draws)
        self._advance()

    def _advance(self, _ended: object = None) -> None:
        wanted = next(self._program)
        if isinstance(wanted, simpy.Event):
            wanted.callbacks.append(self._advance)
            return
        self.hear(wanted)
        self._is_ready = True
        if not self._busy:
            self._idle()

    def _idle(self) -> None:
        assert isinstance(self.decider.state, TrainerState)
        if self._is_ready and self.decider.state.waits is None:
            self._is_ready = False
            self._advance()

    def _train(self, draws: Sequence[int]) -> Program:
        steps = zip(self._job.steps, draws, strict=True)
        for self._index, (step, x) in enumerate(steps):
            self.step_begins(step)
            yield from self._step(step, x)
            self._bytes_sent = 0
            self.step_done()
        self.ended_ns = self._clock.now
        yield self._clock.event()  # nothing follows

    def _step(self, step: int, x: int) -> Program:
        clock, job, memory, rules = self._clock, self._job, self._memory, self._job.rules
        start_ns, fetch_ns = clock.now, 0
        yield StepBegin(step)
        read_ns = self._head.forward_begins(clock.now) - clock.now
        if read_ns:
            yield clock.timeout(read_ns)
        num_look_ups = job.traffic.num_look_ups(self.decider.rank, self._index)
        reads_all = rules.has_dense or rules.mode == "geo_sgd" or not num_look_ups
        memory.computed_from = memory.versions if reads_all else _NEWEST * rules.servers
        for self._look_up in range(num_look_ups if rules.mode != "geo_sgd" else 0):
            yield LookUp()
        self._span("wait", start_ns + read_ns, clock.now)
        forward_ns = stretch(job.table.forward_ns, x)
        backward_ns = stretch(job.table.forward_ns + job.table.backward_ns, x) - forward_ns
        yield self._compute(forward_ns, backward_ns)
        self._idle_since_ns = arrival_ns = clock.now
        self._update_ns = 0
        yield BackwardEnd()
        if job.waits_each_step:
            yield Flush()
        if self._index == len(job.steps) - 1:  # the last step includes sending what is queued
            yield DataEnd()
            if fetch_ns := self._head.read_ns():
                yield clock.timeout(fetch_ns)
        self._span("wait", self._idle_since_ns, clock.now)
        is_synchronous = rules.mode == "synchronous"
        self.records.append(
            StepRecord(
                rank=self.decider.rank,
                step=step,
                start_ns=start_ns,
                read_ns=read_ns,
                forward_ns=forward_ns,
                backward_ns=backward_ns,
                stall_ns=clock.now - start_ns - fetch_ns - read_ns - forward_ns - backward_ns - self._update_ns,
                update_ns=self._update_ns,
                end_ns=clock.now,
                arrival_ns=arrival_ns if is_synchronous else None,  # in the other modes trainers do not wait for one another
                local_steps=1 if is_synchronous else None,
                loss=None,
                bytes_sent=self._bytes_sent,
            )
        )

    def _compute(self, forward_ns: int, backward_ns: int) -> simpy.Event:
        """Begin a forward, and return the event at the end of its backward."""
        if self.order is not None:
            self.order.add(Act("trainer", self.decider.rank, "forward"))
        begin_ns = self._clock.now
        self._span("forward", begin_ns, begin_ns + forward_ns)
        self._span("backward", begin_ns + forward_ns, begin_ns + forward_ns + backward_ns)
        return self._clock.timeout(forward_ns + backward_ns)

    def _begin(self, event: Event, carried: Carried) -> None:  # noqa: ARG002  # ``Actor`` passes it to all
        if isinstance(event, Message) and event.kind == "rows":
            read = list(self._memory.computed_from)
            read[event.rank] = min(read[event.rank], event.version)
            self._memory.computed_from = tuple(read)

    def _do(self, operation: Operation) -> None:
        rank = self.decider.rank
        if operation.kind == "update":
            self._update_ns = self._took_ns
            begin_ns = self._clock.now - self._update_ns
            self._span("wait", self._idle_since_ns, begin_ns)
            self._span("update", begin_ns, self._clock.now)
            self._idle_since_ns = self._clock.now
        elif operation.kind == "send":
            assert operation.message is not None
            if operation.message in ("gradient", "step"):
                self._memory.queue.append(self._memory.computed_from)
            message = Message("trainer", rank, operation.message, count=operation.count)
            if operation.group == "sender":
                self.tell_sender(message)
                return
            for server in range(self._job.rules.servers):
                carried = Carried(self._job.traffic.header_bytes)
                if operation.message == "look_up":
                    asked, answered = self._job.traffic.looked_up(server, rank, self._index, self._look_up)
                    carried = Carried(asked, answer_nbytes=answered)
                self._post(server, message, carried)

    def _span(self, name: str, start_ns: int, end_ns: int) -> None:
        if end_ns > start_ns:
            self.spans.append(Span(self.decider.rank, COMPUTE, name, start_ns, end_ns - start_ns))
