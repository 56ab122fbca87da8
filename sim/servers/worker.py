"""Worker: a trainer's steps, the sender beside it, and a node of trainers that share one."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fleetbench.plan.events import BackwardEnd, DataEnd, Event, Flush, LookUp, Message, StepBegin, TimerFired
from fleetbench.plan.layers import StepHead
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.plan.servers.states import TrainerState
from fleetbench.result import StepRecord
from fleetbench.stragglers import stretch
from fleetbench.timeline import COMPUTE, Span
from sim.clock import Clock
from sim.servers.actor import Act, Actor, Carried, Job, NodeCosts, Post
from sim.servers.traffic import Part

Local = Callable[[Message, int], None]
"""Carries a message about a piece between a trainer and its sender."""

Versions = tuple[int, ...]
"""How often each server had updated some parameters."""
_NEWEST = (2**62,)
"""Of a server nothing of which has been read."""


@dataclass(slots=True)
class Memory:
    """What a trainer and its sender share."""

    versions: Versions
    """Of the parameters that the next step computes with."""
    computed_from: Versions
    """Of the oldest that the step under way computes with."""
    queue: deque[Versions] = field(default_factory=deque)
    """Of what each gradient was computed from that the sender has not taken."""


class Sender(Actor):
    """Merges, pushes and pulls in the background."""

    def __init__(self, clock: Clock, deciders: Sequence[RoleDecider], job: Job, memory: Memory) -> None:
        super().__init__(clock, deciders, job)
        self._memory = memory
        self._timers = 0
        self._received: dict[int, int] = {}
        self._staged: list[Versions] = [memory.versions]
        self._staged_steps: Part = (self.decider.rank, 0, 0)
        self.post: Post
        self.tell_trainer: Local

    def _begin(self, event: Event, carried: Carried, since_ns: int) -> None:  # noqa: ARG002  # what an actor is told
        if isinstance(event, Message) and event.kind == "parameters":
            self._received[event.rank] = event.version

    def _do(self, operation: Operation) -> None:
        if operation.kind == "set_timer":
            self._timers += 1
            number = self._timers
            # a timer that was set later has taken its place
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
            self.tell_trainer(Message("sender", rank, operation.message, count=operation.count), self._piece)
            return
        traffic = self._job.traffic_of(self._piece)
        for server in range(self._job.rules.servers):
            carried = Carried(traffic.header_bytes, piece=self._piece)
            if operation.payload is not None:
                versions = tuple(version[server] for version in self._staged)
                carried = Carried(traffic.pushed(server, [self._staged_steps]), versions, self._staged_steps, piece=self._piece)
            message = Message("sender", rank, operation.message, count=operation.count, version=min(carried.versions, default=0))
            self.post("sender", rank, server, message, carried)


class Trainer(Actor):
    """Computes step after step. It hears messages at any time, and goes on when the strategy lets it.

    Its last step ends when all that it has handed on is pushed, and pulled what others changed.
    """

    def __init__(self, clock: Clock, deciders: Sequence[RoleDecider], job: Job, memory: Memory) -> None:
        super().__init__(clock, deciders, job)
        self.records: list[StepRecord] = []
        self.ended_ns: int | None = None
        self._memory = memory
        self._head = StepHead(job.table, job.fetch_every, clock.now)
        self._steps: deque[tuple[int, int]] = deque()
        self._next: Callable[[], None] | None = None
        self._bytes_sent = 0
        self._update_ns = self._idle_since_ns = self._arrival_ns = 0
        self._start_ns = self._read_ns = self._forward_ns = self._backward_ns = 0
        self._look_ups = 0
        """Begun in this step."""
        self.post: Post
        self.tell_sender: Local
        self.step_begins: Callable[[int], None] = lambda _: None
        self.step_done: Callable[[], None] = lambda: None

    @property
    def _index(self) -> int:
        """Of the step under way."""
        return len(self._job.steps) - len(self._steps)

    @property
    def _num_look_ups(self) -> int:
        return self._job.traffic.num_look_ups(self.decider.rank, self._index)

    def sent(self, nbytes: int) -> None:
        """So many bytes more have left this trainer's host."""
        self._bytes_sent += nbytes

    def run(self, draws: Sequence[int]) -> None:
        """Train the job's steps, each with its X in units of 2^-24."""
        self._steps.extend(zip(self._job.steps, draws, strict=True))
        self._begin_step()

    def _begin_step(self) -> None:
        self._start_ns = self._clock.now
        self.step_begins(self._steps[0][0])
        self._tell(StepBegin(self._steps[0][0]), self._begin_read)

    def _begin_read(self) -> None:
        self._read_ns = self._head.forward_begins(self._clock.now) - self._clock.now
        if not self._read_ns:
            self._end_read()
            return
        self._clock.timeout(self._read_ns).callbacks.append(lambda _: self._end_read())

    def _end_read(self) -> None:
        rules = self._job.rules
        reads_all = rules.has_dense or rules.mode == "geo_sgd" or not self._num_look_ups
        self._memory.computed_from = self._memory.versions if reads_all else _NEWEST * rules.servers
        self._look_ups = 0
        self._look_up()

    def _look_up(self) -> None:
        if self._job.rules.mode != "geo_sgd" and self._look_ups < self._num_look_ups:
            self._look_ups += 1
            self._tell(LookUp(), self._look_up)
        else:
            self._begin_forward()

    def _begin_forward(self) -> None:
        if self.order is not None:
            self.order.add(Act("trainer", self.decider.rank, "forward"))
        x = self._steps[0][1]
        self._forward_ns = stretch(self._job.table.forward_ns, x)
        self._backward_ns = stretch(self._job.table.forward_ns + self._job.table.backward_ns, x) - self._forward_ns
        begin_ns = self._clock.now
        self._span("wait", self._start_ns + self._read_ns, begin_ns)
        self._span("forward", begin_ns, begin_ns + self._forward_ns)
        self._span("backward", begin_ns + self._forward_ns, begin_ns + self._forward_ns + self._backward_ns)
        for number, piece in enumerate(self._job.pieces):
            ready = self._clock.timeout(stretch(self._job.table.forward_ns + piece.ready_ns, x))
            ready.callbacks.append(partial(self._end_piece, number))
        self._clock.timeout(self._forward_ns + self._backward_ns).callbacks.append(lambda _: self._end_backward())

    def _end_piece(self, number: int, _ready: object) -> None:
        self.hear(BackwardEnd(), Carried(piece=number))

    def _end_backward(self) -> None:
        self._idle_since_ns = self._arrival_ns = self._clock.now
        self._update_ns = 0
        then = partial(self._tell, Flush(), self._end_step) if self._job.waits_each_step else self._end_step
        if not self._job.pieces:
            self._tell(BackwardEnd(), then)
            return
        self._next = then
        self._idle()

    def _end_step(self) -> None:
        if len(self._steps) > 1:
            self._record()
            self._begin_step()
        else:  # what is queued goes out, and belongs to the last step
            self._tell(DataEnd(), self._finish)

    def _record(self) -> None:
        """The step is over."""
        step, _ = self._steps.popleft()
        now_ns = self._clock.now
        read_ns = self._head.read_ns() if not self._steps else 0
        known_ns = read_ns + self._read_ns + self._forward_ns + self._backward_ns + self._update_ns
        is_synchronous = self._job.rules.mode == "synchronous"
        self._span("wait", self._idle_since_ns, now_ns)
        self.records.append(
            StepRecord(
                rank=self.decider.rank,
                step=step,
                start_ns=self._start_ns,
                read_ns=self._read_ns,
                forward_ns=self._forward_ns,
                backward_ns=self._backward_ns,
                stall_ns=now_ns - self._start_ns - known_ns,
                update_ns=self._update_ns,
                end_ns=now_ns,
                arrival_ns=self._arrival_ns if is_synchronous else None,  # in the other modes trainers do not wait for one another
                local_steps=1 if is_synchronous else None,
                loss=None,
                bytes_sent=self._bytes_sent,
            )
        )
        self._bytes_sent = 0
        self.step_done()

    def _finish(self) -> None:
        if self._head.read_ns():
            self._clock.timeout(self._head.read_ns()).callbacks.append(lambda _: self._leave())
        else:
            self._leave()

    def _leave(self) -> None:
        self._record()
        self.ended_ns = self._clock.now

    def _tell(self, event: Event, then: Callable[[], None]) -> None:
        """Tell the strategy, of every piece, and go on once it lets the trainer."""
        last = len(self.deciders) - 1
        for piece in range(last):
            self.hear(event, Carried(piece=piece))
        self._next = then
        self.hear(event, Carried(piece=last))

    def _idle(self) -> None:
        if self._next is None:
            return
        if all(isinstance(decider.state, TrainerState) and decider.state.waits is None for decider in self.deciders):
            then, self._next = self._next, None
            then()

    def _begin(self, event: Event, carried: Carried, since_ns: int) -> None:  # noqa: ARG002  # what an actor is told
        if isinstance(event, Message) and event.kind == "rows":
            read = list(self._memory.computed_from)
            read[event.rank] = min(read[event.rank], event.version)
            self._memory.computed_from = tuple(read)

    def _do(self, operation: Operation) -> None:
        if operation.kind == "update":
            self._update_ns = self._took_ns
            begin_ns = self._clock.now - self._update_ns
            self._span("wait", self._idle_since_ns, begin_ns)
            self._span("update", begin_ns, self._clock.now)
            self._idle_since_ns = self._clock.now
        elif operation.kind == "send" and operation.group == "sender":
            assert operation.message is not None
            if operation.message in ("gradient", "step"):
                self._memory.queue.append(self._memory.computed_from)
            self.tell_sender(Message("trainer", self.decider.rank, operation.message, count=operation.count), self._piece)
        elif operation.kind == "send":
            assert operation.message is not None
            for server in range(self._job.rules.servers):
                message = Message("trainer", self.decider.rank, operation.message)
                self.post("trainer", self.decider.rank, server, message, self._carried(operation, server))

    def _carried(self, operation: Operation, server: int) -> Carried:
        if operation.message != "look_up":
            return Carried(self._job.traffic.header_bytes, piece=self._piece)
        asked, answered = self._job.traffic.looked_up(server, self.decider.rank, self._index, self._look_ups - 1)
        return Carried(asked, answer_nbytes=answered)

    def _span(self, name: str, start_ns: int, end_ns: int) -> None:
        if end_ns > start_ns:
            self.spans.append(Span(self.decider.rank, COMPUTE, name, start_ns, end_ns - start_ns))


class Node:
    """Trainers that reduce their gradients among themselves before one of them pushes the sum, and broadcasts what it pulled.

    It stands between the trainers and the one sender that they share, and has one communicator, on which a reduce or a broadcast
    waits for the one before it. To the servers it is one trainer.
    """

    def __init__(self, clock: Clock, costs: NodeCosts, trainers: Sequence[Trainer], sender: Sender) -> None:
        self._clock = clock
        self._costs = costs
        self._trainers = trainers
        self._sender = sender
        self._come = Counter[tuple[str, int]]()
        """Trainers whose word about a piece is here, until all are."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """Collectives: what each takes, and what follows it. The first is under way."""
        for trainer in trainers:
            trainer.tell_sender = self._hear_trainer
        sender.tell_trainer = self._hear_sender

    def _hear_trainer(self, message: Message, piece: int) -> None:
        key = message.kind, piece
        self._come[key] += 1
        if self._come[key] < len(self._trainers):
            return
        del self._come[key]
        self._collective(self._costs.reduce_ns, message, piece, lambda: self._sender.hear(message, Carried(piece=piece)))

    def _hear_sender(self, message: Message, piece: int) -> None:
        self._collective(self._costs.broadcast_ns, message, piece, lambda: self._tell_trainers(message, piece))

    def _tell_trainers(self, message: Message, piece: int) -> None:
        for trainer in self._trainers:
            trainer.hear(message, Carried(piece=piece))

    def _collective(self, costs_ns: Sequence[int], message: Message, piece: int, then: Callable[[], None]) -> None:
        """A gradient and fresh parameters pass through the trainers; other messages carry nothing."""
        if message.kind not in ("gradient", "fresh"):
            self._clock.timeout(0).callbacks.append(lambda _: then())
            return
        for trainer in self._trainers:
            trainer.sent(self._costs.nbytes[piece])
        self._waiting.append((costs_ns[piece], then))
        if len(self._waiting) == 1:
            self._start()

    def _start(self) -> None:
        self._clock.timeout(self._waiting[0][0]).callbacks.append(lambda _: self._end())

    def _end(self) -> None:
        _, then = self._waiting.popleft()
        if self._waiting:
            self._start()
        then()
