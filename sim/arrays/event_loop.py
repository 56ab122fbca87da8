"""Event loop: carries collectives that have ports in common, turn by turn (``sim.network.turns``), in one block of steps.

One part of one collective is a meeting. Those of a queue start in order. Queues whose meetings have ports in common,
directly or not, are a region: a meeting that is alone in its region goes on to its end at once, until another arrives.
"""

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush, heapreplace

from sim.network.links import Links, Port
from sim.network.turns import Window, busy_on, scaled
from sim.network.work import Route

_END, _ARRIVAL, _TURN = range(3)
"""Kinds of events of a meeting, in the order that they have within a nanosecond; among turns the lower number is first."""
_NO_WINDOW = Window(-(2**62), 0, 0)


class Meetings:
    """Routes, queues and successors of meetings, by number, known before anybody joins them.

    ``queues`` has the meetings of each queue in their order, of which ``depth`` are in flight at most;
    ``followers`` has those that start after each meeting's end, by default none.
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
        by_region = _regions([{port for meeting in queue for port in routes[meeting].ports} for queue in queues])
        self.region_of = {meeting: n for n, own in enumerate(by_region) for queue in own for meeting in queues[queue]}
        self.first = [route.first_ns for route in routes]
        self.window = [route.window for route in routes]
        self._turns(routes, links)
        self._alone(routes)

    def _turns(self, routes: Sequence[Route], links: Links) -> None:
        """Turns, each with its own time, what comes after it, and for how long it takes which ports."""
        users: dict[Port, list[tuple[int, int, int]]] = {}
        for meeting, route in enumerate(routes):
            for port, load in zip(route.ports, route.loads, strict=True):
                users.setdefault(port, []).append((meeting, load.numerator, load.denominator))
        alike: dict[tuple[object, ...], Port] = {}  # ports that carry alike are one
        for port, own in users.items():
            if self.depth > 1 or len({self.queue_of[meeting] for meeting, _, _ in own}) > 1:  # else nobody is in the way
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

    def _alone(self, routes: Sequence[Route]) -> None:
        """Times of each meeting alone, from its start: arrivals of its turns, the receiver's ends of the turns before, and its end."""
        known: dict[int, tuple[list[int], list[int], int]] = {}
        for route in routes:
            if id(route) not in known:
                arrives, done, end = [route.first_ns], [0], 0
                for turn in route.turns:
                    left = arrives[-1] + turn.own_ns
                    told, then = (route.window or _NO_WINDOW).next(arrives[-1], left, done[-1])
                    end = left + turn.then_ns
                    arrives.append(max(end, told))
                    done.append(then)
                known[id(route)] = arrives[:-1], done, end
        self.alone = [known[id(route)] for route in routes]

    def carry(self, ready: Sequence[int]) -> tuple[list[int], list[int]]:
        """Starts and ends of all meetings, each ready when the ranks of its part have joined, over idle links."""
        return _Loop(self, ready).run()


class _Loop:
    """Meetings under way: each has started, has turns on its ports from its arrival there on, and ends."""

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
        """Next meeting of each queue, the number in flight, and the start of its last."""
        self._free, self._users = ([0] * meetings.num_ports for _ in range(2))
        """When each port has carried what has arrived, and how many meetings in flight pass it."""
        self._going = [0] * (max(meetings.region_of.values()) + 1)
        self._jumped: dict[int, tuple[int, int]] = {}
        """Meeting of each region that is alone and due at its end, and the time at which it would have started, always alone."""
        self._events: list[tuple[int, int, int]] = []

    def run(self) -> tuple[list[int], list[int]]:
        """Until nothing is in flight."""
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
        """Who was alone in the region has come so far, and is alone no longer."""
        region = self._meetings.region_of[meeting]
        heappush(self._events, (now, _TURN, meeting))
        self._going[region] += 1
        for port in self._meetings.ports[meeting]:
            self._users[port] += 1
        if region not in self._jumped:
            return
        alone, since = self._jumped.pop(region)
        arrives, done, whole = self._meetings.alone[alone]
        number = bisect_left(arrives, now - since)
        if number:
            for port, busy in self._meetings.turns[alone][number - 1][2]:
                self._free[port] = since + arrives[number - 1] + busy
        if number < len(arrives):
            self._turn[alone], self._done[alone] = number, since + done[number]
            self._events.remove((since + whole, _END, alone))
            self._events.append((since + arrives[number], _TURN, alone))
            heapify(self._events)

    def _carry(self, meeting: int, now: int) -> tuple[int, int, int]:
        """A turn, or all that are left of a meeting that is alone in its region; what happens to the meeting next."""
        meetings, number = self._meetings, self._turn[meeting]
        region, window = meetings.region_of[meeting], meetings.window[meeting]
        if self._going[region] == 1 and (not number or window is None):
            arrives, _, whole = meetings.alone[meeting]
            self._jumped[region] = meeting, now - arrives[number]
            return now - arrives[number] + whole, _END, meeting
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
        meetings, region = self._meetings, self._meetings.region_of[meeting]
        self._ends[meeting] = now
        self._going[region] -= 1
        self._jumped.pop(region, None)
        for port in meetings.ports[meeting]:
            self._users[port] -= 1
        self._flying[meetings.queue_of[meeting]] -= 1
        self._start(meetings.queue_of[meeting], now)
        for follower in meetings.followers[meeting]:
            self._missing[follower] -= 1
            self._start(meetings.queue_of[follower], now)


def _regions(ports_of: Sequence[set[Port]]) -> list[list[int]]:
    """The indices of sets that have ports in common, directly or not."""
    found: list[tuple[list[int], set[Port]]] = []
    for index, ports in enumerate(ports_of):
        near = [region for region in found if not region[1].isdisjoint(ports)]
        found = [region for region in found if region not in near]
        indices = [*(other for region in near for other in region[0]), index]
        found.append((indices, ports.union(*(region[1] for region in near))))
    return [indices for indices, _ in found]
