"""Network: where trainers meet in collectives, and what carries these over the cluster's links, alone and beside others.

A collective spends its latency first and then its transfer, at the share of its ports that other
transfers leave it; both slower where its ranks' compute slows it. Latencies share nothing, unless
several in flight were measured to. Collectives inside two nodes share nothing; those that cross nodes
share the nodes' interfaces, and those that cross racks their uplinks.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

from simpy import Event

from fleetbench.plan.operations import Operation
from sim.clock import Clock
from sim.network.links import LATENCY, Links
from sim.network.routes import Routes
from sim.network.sharing import SharedPorts

Changed = Callable[[Fraction], None]
Tell = Callable[[Operation, tuple[int, ...], int, int], None]
"""Told of a collective that has ended, its ranks, its start and its end."""


class Computing:
    """The ranks whose forward or backward is under way.

    A collective goes at full pace while none of its ranks computes, and at 1 / (1 + ``slowdown``) of it
    otherwise: a ring is as slow as its slowest member.
    """

    def __init__(self, slowdown: float = 0.0) -> None:
        self._slow = 1 / (1 + Fraction(repr(slowdown)))  # the decimal that a file writes
        self._ranks: set[int] = set()
        self._watched: dict[Changed, Sequence[int]] = {}

    @property
    def slows(self) -> bool:
        """Whether computing slows anything."""
        return self._slow != 1

    def begins(self, rank: int) -> None:
        """A rank's forward begins."""
        self._change(rank, self._ranks.add)

    def ends(self, rank: int) -> bool:
        """A rank's backward has ended, or waits; whether it was under way."""
        computed = rank in self._ranks
        self._change(rank, self._ranks.discard)
        return computed

    def pace(self, ranks: Sequence[int]) -> Fraction:
        """Of a collective among ``ranks``, as a share of full pace."""
        return Fraction(1) if self._slow == 1 or self._ranks.isdisjoint(ranks) else self._slow

    @contextmanager
    def watching(self, ranks: Sequence[int], changed: Changed) -> Iterator[None]:
        """Tell ``changed`` the pace of a collective among ``ranks`` whenever it changes."""
        self._watched[changed] = ranks
        try:
            yield
        finally:
            del self._watched[changed]

    def _change(self, rank: int, change: Callable[[int], None]) -> None:
        if self._slow == 1:
            return
        before = {changed: self.pace(ranks) for changed, ranks in self._watched.items() if rank in ranks}
        change(rank)
        for changed, pace in before.items():
            now = self.pace(self._watched[changed])
            if now != pace:
                changed(now)


class Network:
    """The cluster's links, as collectives see them, and the ranks' compute beside them."""

    def __init__(self, clock: Clock, links: Links, computing: Computing | None = None) -> None:
        self._clock = clock
        self._links = links
        self._computing = computing or Computing()
        self._ports = SharedPorts(clock, links.capacity)
        self._routes = Routes(links)

    def carry(self, operation: Operation, ranks: tuple[int, ...]) -> Generator[Event, object, None]:
        """Carry out a collective among ``ranks``."""
        route = self._routes.of(operation, ranks)
        cost, ports = route.cost, route.ports
        if not self._computing.slows and not self._links.in_flight:
            yield self._clock.timeout(cost.latency_ns)
            yield self._ports.start(ports, cost.transfer_ns, flow=route.flow).end
            return
        latency = tuple((name + LATENCY, number, way) for name, number, way in ports)
        parts = ((latency, Fraction(cost.latency_ns), None), (ports, cost.transfer_ns, route.flow))
        for passes, takes_ns, flow in parts:
            if takes_ns:  # at the pace that its ranks' compute leaves it
                transfer = self._ports.start(passes, takes_ns, self._computing.pace(ranks), flow)
                with self._computing.watching(ranks, partial(self._ports.repace, transfer)):
                    yield transfer.end


@dataclass(slots=True)
class Meeting:
    """One collective of some ranks: who is still missing before it starts, its start and its end."""

    operation: Operation
    absent: int
    start: Event
    """The network takes it up."""
    end: Event
    waits: dict[Event, None] = field(default_factory=dict)
    """What its ranks still have in flight that comes before it."""


@dataclass(slots=True)
class _Queue:
    """What of one communicator is under way among some ranks, and what joined last."""

    last: Meeting | None = None
    flying: dict[Event, None] = field(default_factory=dict)
    """The ends of what has started and not ended."""


class Collectives:
    """The collectives of a run.

    A collective is known by its operation's id, the same on every rank, and the part of the group
    that meets; the parts of a group meet apart from each other. It waits for every rank of the part
    to ``join`` and for what each of them has in flight before it. A part's operations on one
    communicator start in the order in which its ranks join them, and no more than ``queue_depth``
    are under way. The network carries it, and its end triggers one event for all ranks.
    """

    def __init__(self, clock: Clock, network: Network, queue_depth: int = 1, tell: Tell | None = None) -> None:
        self._tell = tell
        self._clock = clock
        self._network = network
        self._queue_depth = queue_depth
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._queues: dict[tuple[int, tuple[int, ...]], _Queue] = {}

    def join(self, operation: Operation, part: tuple[int, ...], after: Sequence[Event]) -> Meeting:
        """One rank of ``part`` arrives at ``operation``, which starts once the events ``after`` have ended."""
        key = (operation.id, part[0])
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(operation, len(part), self._clock.event(), self._clock.event())
        assert meeting.operation == operation, f"ranks disagree about operation {operation.id}: {meeting.operation} and {operation}"
        meeting.waits.update(dict.fromkeys(after))
        meeting.absent -= 1
        if meeting.absent == 0:
            del self._meetings[key]
            queue = self._queues.setdefault((operation.communicator, part), _Queue())
            if queue.last is not None and not queue.last.start.triggered:
                meeting.waits[queue.last.start] = None
            queue.last = meeting
            self._clock.process(self._carry(meeting, part, queue))
        return meeting

    def _carry(self, meeting: Meeting, part: tuple[int, ...], queue: _Queue) -> Generator[Event, object, None]:
        if meeting.waits:
            yield self._clock.all_of(meeting.waits)
        if len(queue.flying) >= self._queue_depth:  # the next one waits for this one's start, so one end lets one start
            yield self._clock.any_of(queue.flying)
        start_ns = self._clock.now
        queue.flying[meeting.end] = None
        meeting.start.succeed()
        yield from self._network.carry(meeting.operation, part)
        if self._tell is not None:
            self._tell(meeting.operation, part, start_ns, self._clock.now)
        del queue.flying[meeting.end]
        meeting.end.succeed()
