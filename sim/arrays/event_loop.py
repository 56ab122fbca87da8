"""Event loop: carries collectives that share ports, turn by turn (``sim.network.turns``), in one block of steps.

A meeting is one collective in one part of its group. The meetings of a queue start in order.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush, heapreplace

from sim.network.links import Links, Port
from sim.network.turns import busy_on, scaled
from sim.network.work import Route

_END, _ARRIVAL, _TURN = range(3)
"""Kinds of a meeting's events, in their order within a nanosecond. Equal events are ordered by the number of
the meeting."""


class Meetings:
    """Routes, queues and followers of meetings, by number; ranks join the meetings later.

    ``queues`` lists the meetings of each queue in order; at most ``depth`` of them are in flight.
    ``followers`` lists, for each meeting, those that start after its end; by default there are none.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        queues: Sequence[Sequence[int]],
        links: Links,
        depth: int = 1,
        followers: Sequence[Sequence[int]] = (),
    ) -> None:
        self.queues, self.depth = queues, depth
        self.followers = followers or [()] * len(routes)
        self.queue_of = {meeting: number for number, queue in enumerate(queues) for meeting in queue}
        self.first = [route.first_ns for route in routes]
        self.window = [route.window for route in routes]
        self._turns(routes, links)

    def _turns(self, routes: Sequence[Route], links: Links) -> None:
        """Set ``turns``: each turn's own time, the time after it, and its ports, each with its busy time."""
        users: dict[Port, list[tuple[int, int, int]]] = {}
        for meeting, route in enumerate(routes):
            for port, load in zip(route.ports, route.loads, strict=True):
                users.setdefault(port, []).append((meeting, load.numerator, load.denominator))
        alike: dict[tuple[object, ...], Port] = {}  # ports with the same users and slowdown count as one
        for port, own in users.items():
            if self.depth > 1 or len({self.queue_of[meeting] for meeting, _, _ in own}) > 1:  # otherwise its users never compete
                alike.setdefault((*own, links.slower(port, 2)), port)
        self.ports: list[list[int]] = [[] for _ in routes]
        busy: list[list[list[int]]] = [[] for _ in routes]
        for number, port in enumerate(alike.values()):
            for meeting, numerator, denominator in users[port]:
                load = Fraction(numerator, denominator)
                self.ports[meeting].append(number)
                busy[meeting].append([busy_on(turn, load) for turn in routes[meeting].turns])
        self.turns = [
            [(turn.own_ns, turn.then_ns, [*zip(ports, taken, strict=True)]) for turn, *taken in zip(route.turns, *own, strict=True)]
            for route, ports, own in zip(routes, self.ports, busy, strict=True)
        ]
        most = len(self.queues) * self.depth
        together = [[links.slower(port, number) for number in range(most + 1)] for port in alike.values()]
        self.num_ports, self.slower = len(alike), together if links.in_flight else None

    def carry(self, ready: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the starts and ends in ns of all meetings on idle links; their ranks have joined at ``ready``."""
        return _Loop(self, ready).run()


class _Loop:
    """Runs meetings to their ends: each starts, arrives at its ports, takes its turns on them, and ends."""

    def __init__(self, meetings: Meetings, ready: Sequence[int]) -> None:
        self._meetings, self._ready = meetings, ready
        num, queues = len(ready), len(meetings.queues)
        self._starts, self._ends, self._turn, self._done = ([0] * num for _ in range(4))
        self._missing = [0] * num
        """Number of meetings that each still waits for."""
        for own in meetings.followers:
            for meeting in own:
                self._missing[meeting] += 1
        self._next, self._flying, self._started = ([0] * queues for _ in range(3))
        """By queue: index of its next meeting, number of meetings in flight, and start in ns of the last one
        that started."""
        self._free, self._users = ([0] * meetings.num_ports for _ in range(2))
        """By port: time in ns at which it has carried everything that has arrived, and number of meetings in
        flight that pass it."""
        self._events: list[tuple[int, int, int]] = []

    def run(self) -> tuple[list[int], list[int]]:
        """Run until nothing is in flight, and return the starts and ends of all meetings."""
        for queue in range(len(self._next)):
            self._start(queue, 0)
        events, carry = self._events, self._carry
        while events:
            now, kind, meeting = events[0]
            if kind == _TURN:
                heapreplace(events, carry(meeting, now))
            else:
                heappop(events)
                (self._arrive if kind == _ARRIVAL else self._end)(meeting, now)
        return self._starts, self._ends

    def _start(self, queue: int, now: int) -> None:
        own, meetings = self._meetings.queues[queue], self._meetings
        while self._next[queue] < len(own) and self._flying[queue] < meetings.depth:
            meeting = own[self._next[queue]]
            if self._missing[meeting]:
                return
            begins = max(now, self._ready[meeting], self._started[queue])
            self._starts[meeting] = self._started[queue] = self._done[meeting] = begins
            self._next[queue] += 1
            self._flying[queue] += 1
            heappush(self._events, (begins + meetings.first[meeting], _ARRIVAL, meeting))

    def _arrive(self, meeting: int, now: int) -> None:
        """Let a meeting arrive at its ports."""
        heappush(self._events, (now, _TURN, meeting))
        for port in self._meetings.ports[meeting]:
            self._users[port] += 1

    def _carry(self, meeting: int, now: int) -> tuple[int, int, int]:
        """Carry a meeting's next turn, and return its next event."""
        meetings, number = self._meetings, self._turn[meeting]
        window = meetings.window[meeting]
        own, then, ports = meetings.turns[meeting][number]
        if meetings.slower is not None:
            slower = [meetings.slower[port][self._users[port]] for port, _ in ports]
            ports = [(port, scaled(busy, by)) for (port, busy), (by, _) in zip(ports, slower, strict=True)]
            then = scaled(then, max((by for _, by in slower), default=1.0))
        left, free = now + own, self._free
        for port, busy in ports:
            before = free[port]
            free[port] = leaves = (before if before > now else now) + busy  # noqa: FURB136  # a call takes twice as long
            if leaves > left:  # noqa: PLR1730  # as above
                left = leaves
        self._turn[meeting] = number + 1
        if number + 1 == len(meetings.turns[meeting]):
            return left + then, _END, meeting
        if window is None:
            return left + then, _TURN, meeting
        told, self._done[meeting] = window.next(now, left, self._done[meeting])
        return max(left + then, told), _TURN, meeting

    def _end(self, meeting: int, now: int) -> None:
        meetings = self._meetings
        self._ends[meeting] = now
        for port in meetings.ports[meeting]:
            self._users[port] -= 1
        self._flying[meetings.queue_of[meeting]] -= 1
        self._start(meetings.queue_of[meeting], now)
        for follower in meetings.followers[meeting]:
            self._missing[follower] -= 1
            self._start(meetings.queue_of[follower], now)
