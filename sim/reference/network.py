"""Network: collectives of trainers, and the cluster's links that carry one or several of them at a time.

A collective takes its ports in turns, first come, first served (``sim.network.turns``). It is slower while
its ranks compute, and while several are in flight, as far as measurements show. Collectives inside two nodes
share nothing. Those that cross nodes share the nodes' interfaces, and those that cross racks or sites their links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from simpy import Event

from fleetbench.plan.operations import Operation
from sim.clock import Clock, half_up
from sim.network.links import Links, Port
from sim.network.routes import Routes
from sim.network.turns import Turn, busy_on, scaled
from sim.network.work import Route

Tell = Callable[[Operation, tuple[int, ...], int, int], None]
"""Called at a collective's end with its operation, ranks, start in ns and end in ns."""


class Computing:
    """The ranks that are in their forward or backward.

    A collective runs at full pace while none of its ranks computes, and at 1 / (1 + ``slowdown``) of it
    otherwise: a ring is as slow as its slowest member.
    """

    def __init__(self, slowdown: float = 0.0) -> None:
        self._slow = 1 / (1 + Fraction(repr(slowdown)))  # the decimal that a file writes
        self._ranks: set[int] = set()
        self.carried: dict[OwnTime, Sequence[int]] = {}
        """Collectives in flight, with their ranks."""

    def begins(self, rank: int) -> None:
        """Record that a rank starts to compute or continues."""
        self._change(rank, self._ranks.add)

    def ends(self, rank: int) -> bool:
        """Record that a rank's backward has ended or waits, and return whether it was computing."""
        computed = rank in self._ranks
        self._change(rank, self._ranks.discard)
        return computed

    def pace(self, ranks: Sequence[int]) -> Fraction:
        """Return the pace of a collective among ``ranks``, as a share of full pace."""
        return Fraction(1) if self._slow == 1 or self._ranks.isdisjoint(ranks) else self._slow

    def _change(self, rank: int, change: Callable[[int], None]) -> None:
        if self._slow == 1:
            return
        change(rank)
        for own, ranks in self.carried.items():
            if rank in ranks and (pace := self.pace(ranks)) != own.pace:
                own.change(pace)


class OwnTime:
    """Progress in ns of a collective by itself, at the pace that its ranks' compute allows.

    It is integrated exactly, and the time of each mark that is reached is rounded once.
    """

    def __init__(self, clock: Clock, pace: Fraction) -> None:
        self._clock = clock
        self.pace = pace
        self._since_ns, self._passed_ns = clock.now, Fraction(0)
        self._changed: Event | None = None
        self._due_ns: int | None = None

    @property
    def now(self) -> Fraction:
        """Progress in ns since the collective's start."""
        return self._passed_ns + (self._clock.now - self._since_ns) * self.pace

    def change(self, pace: Fraction) -> None:
        """Continue at another pace."""
        self._since_ns, self._passed_ns, self.pace = self._clock.now, self.now, pace
        if (
            self._changed is not None and self._due_ns != self._clock.now
        ):  # a mark that is due now counts as reached, in any order of events
            self._changed.succeed()
            self._changed = None

    def reach(self, mark_ns: Fraction | int) -> Generator[Event, object, None]:
        """Wait until the progress reaches ``mark_ns``."""
        while (left_ns := half_up((mark_ns - self.now) / self.pace)) > 0:
            self._due_ns, self._changed = self._clock.now + left_ns, self._clock.event()
            reached = self._clock.timeout(left_ns)
            yield reached | self._changed
            if reached.processed:
                self._changed = None
                return


class Network:
    """The cluster's links, which carry collectives while ranks compute."""

    def __init__(self, clock: Clock, links: Links, computing: Computing | None = None) -> None:
        self._clock = clock
        self._links = links
        self._computing = computing or Computing()
        self._routes = Routes(links)
        self._free_ns: dict[Port, int] = {}
        """Time in ns at which each port has carried everything that has arrived."""
        self._in_flight = Counter[Port]()
        self._arrived: list[tuple[tuple[int, int], Event]] = []

    def carry(self, operation: Operation, ranks: tuple[int, ...]) -> Generator[Event, object, None]:
        """Carry out a collective among ``ranks``."""
        route = self._routes.of(operation, ranks)
        own = OwnTime(self._clock, self._computing.pace(ranks))
        self._computing.carried[own] = ranks
        yield from own.reach(route.first_ns)
        self._in_flight.update(route.ports)
        yield from self._turns(route, own, (operation.id, ranks[0]))
        self._in_flight.subtract(route.ports)
        del self._computing.carried[own]

    def _turns(self, route: Route, own: OwnTime, place: tuple[int, int]) -> Generator[Event, object, None]:
        arrives, done = Fraction(route.first_ns), Fraction(0)
        """Progress in ns at which the next turn arrives, and at which the receiver is done with the previous
        message; see ``Window``."""
        for turn in route.turns:
            yield from own.reach(arrives)
            yield self._next_of(place)
            free_ns, latencies = self._take(route, turn)
            left = arrives + turn.own_ns
            yield from own.reach(left)
            if free_ns > self._clock.now:
                yield self._clock.until(free_ns)
                left = own.now
            after = left + scaled(turn.then_ns, latencies)
            if route.window is None:
                arrives = after
            else:
                told, done = route.window.next(arrives, left, done)
                arrives = max(after, told)
        yield from own.reach(after)

    def _next_of(self, place: tuple[int, int]) -> Event:
        """Return an event for a collective's turn.

        It comes after everything else at this time, in the order of ``place``.
        """
        self._arrived.append((place, self._clock.event()))
        if len(self._arrived) == 1:
            self._clock.at_last().callbacks.append(self._serve)
        return self._arrived[-1][1]

    def _serve(self, _event: Event) -> None:
        arrived, self._arrived = sorted(self._arrived, key=lambda arrival: arrival[0]), []
        for _, served in arrived:
            served.succeed()

    def _take(self, route: Route, turn: Turn) -> tuple[int, float]:
        """Occupy the ports of a route with a turn.

        Returns the time in ns at which all ports have carried the turn, or 0 if nothing delays it; and the
        factor on latencies.
        """
        now_ns, latest_ns, latencies = self._clock.now, 0, 1.0
        for port, load in zip(route.ports, route.loads, strict=True):
            slower, own = self._links.slower(port, self._in_flight[port])
            busy_ns = scaled(busy_on(turn, load), slower)
            begins_ns = max(self._free_ns.get(port, 0), now_ns)
            self._free_ns[port] = begins_ns + busy_ns
            if begins_ns > now_ns or slower > 1.0:
                latest_ns = max(latest_ns, begins_ns + busy_ns)
            latencies = max(latencies, own)
        return latest_ns, latencies


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective of some ranks: the number that has not joined yet, its start and its end."""

    operation: Operation
    absent: int
    start: Event
    """Event at which the network starts to carry it."""
    end: Event
    waits: dict[Event, None] = field(default_factory=dict)
    """Events before which it cannot start, such as the ends of the collectives that it comes after."""
    after: dict[Meeting, None] = field(default_factory=dict)
    met_ns: int = 0
    """Time in ns at which the last rank had joined it and the collectives that it comes after."""


@dataclass(slots=True)
class _Queue:
    """The collectives of one communicator that are in flight among some ranks, and the last one joined."""

    last: Meeting | None = None
    flying: dict[Event, None] = field(default_factory=dict)
    """Ends of the collectives that have started and not ended."""


class Collectives:
    """The collectives of a run.

    A collective is identified by its operation's id, the same on every rank, and the part of the group that
    meets; the parts of a group meet independently. It waits for every rank of the part to ``join``, and for
    what each of them has in flight before it. A part's operations on one communicator start in the order in
    which its ranks join them, and at most ``queue_depth`` are in flight. The network carries it, and its end
    triggers one event for all ranks.
    """

    def __init__(self, clock: Clock, network: Network, queue_depth: int = 1, tell: Tell | None = None) -> None:
        self._tell = tell
        self._clock = clock
        self._network = network
        self._queue_depth = queue_depth
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._queues: dict[tuple[int, tuple[int, ...]], _Queue] = {}

    def join(self, operation: Operation, part: tuple[int, ...], after: Sequence[Meeting]) -> Meeting:
        """Let one rank of ``part`` join ``operation``, which starts after those in ``after`` have ended."""
        key = (operation.id, part[0])
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(operation, len(part), self._clock.event(), self._clock.event())
        assert meeting.operation == operation, f"ranks disagree about operation {operation.id}: {meeting.operation} and {operation}"
        meeting.after.update(dict.fromkeys(after))
        meeting.absent -= 1
        if meeting.absent == 0:
            meeting.met_ns = self._clock.now
            meeting.waits.update((other.end, None) for other in meeting.after)
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
        meeting.met_ns = max(meeting.met_ns, *(other.met_ns for other in meeting.after), 0)
        meeting.after.clear()
        # the next one waits for this one's start, so each end releases one
        if len(queue.flying) >= self._queue_depth:
            yield self._clock.any_of(queue.flying)
        start_ns = self._clock.now
        queue.flying[meeting.end] = None
        meeting.start.succeed()
        yield from self._network.carry(meeting.operation, part)
        if self._tell is not None:
            self._tell(meeting.operation, part, start_ns, self._clock.now)
        del queue.flying[meeting.end]
        meeting.end.succeed()
