"""Server ports: transfers between trainers and servers share links, at a cost that does not grow with their number.

A connection of ``Wires`` carries its messages one after the other. Connections that have a host's link in
common share it (max-min fair; see ``sim.network.sharing``). A message arrives one latency of the link after
its last byte; between two processes of one host, it arrives at once.

Every transfer passes one port of a server and one of a trainer's host. While servers' ports have more users
than trainers' ports, the max-min fair speed is one n-th of the server's port for each of its n users. So all
users of a port progress equally, and a single number tracks them: the progress of a user that has been there
from the beginning. The next user to end is the first of a heap. ``SharedPorts`` visits all users at every
start and end instead; times are equal to the nanosecond.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import count

from simpy import Event

from fleetbench.cluster import Link
from sim.clock import Clock, half_up
from sim.network.links import Port
from sim.network.sharing import SharedPorts, Transfer
from sim.network.work import BITS_NS


@dataclass(slots=True, eq=False)
class _Crowd:
    """Users of a server's port: the transfers that pass it.

    While the crowd is ``apart``, as it is at first, each has its own timer; otherwise all progress together.
    """

    port: Port
    beside: Counter[Port] = field(default_factory=Counter)
    """Other servers' ports, each with the number of pairs of transfers, one to each server, that share a
    trainer's port."""
    apart: bool = True
    done_ns: Fraction = Fraction(0)
    """Progress of a user that has been there from the beginning, as time in ns at the speed that it has alone."""
    since_ns: int = 0
    num: int = 1
    """Number of users since ``since_ns``."""
    waiting: list[tuple[Fraction, int, Transfer]] = field(default_factory=list)
    """Heap of transfers, each with the ``done_ns`` at which it ends and a number that breaks ties."""
    timer: Event | None = None
    """Event at the end of the first transfer in ``waiting``."""

    def advance(self, now_ns: int) -> None:
        """Advance the progress of all users to ``now_ns``."""
        self.done_ns += Fraction(now_ns - self.since_ns, self.num)
        self.since_ns = now_ns

    def add(self, transfer: Transfer, number: int) -> None:
        """Add a transfer as a user from now on."""
        heapq.heappush(self.waiting, (self.done_ns + transfer.remaining_ns, number, transfer))

    def next_due_ns(self) -> int | None:
        """Return when the first user ends, in ns, rounded once as in ``SharedPorts``; ``None`` without users."""
        if not self.waiting:
            return None
        return self.since_ns + max(half_up((self.waiting[0][0] - self.done_ns) * self.num), 0)


class ServerPorts(SharedPorts):
    """``SharedPorts`` for transfers that each pass one port of a host with servers and without trainers."""

    def __init__(self, clock: Clock, servers: Collection[int]) -> None:
        super().__init__(clock)
        self._servers = frozenset(servers)
        self._crowds: dict[Port, _Crowd] = {}
        self._numbers = count()
        self._trainers_ports = Counter[int]()
        """Number of trainers' ports, by their number of users."""
        self._most = 0
        """Largest number of users of a trainer's port."""

    def transfer(self, ports: tuple[Port, ...], alone_ns: Fraction) -> Event:
        """See ``SharedPorts``."""
        started = Transfer(ports, alone_ns, self._clock.event(), self._clock.now)
        self._settle(self._reached_from(ports))
        crowds = self._reached_from(ports)
        self._change(started, 1)
        self._share(crowds, started)
        return started.end

    def _end(self, transfer: Transfer, timer: Event) -> None:
        if timer is transfer.timer:  # else another start or end has moved this end
            self._settle(self._reached_from(transfer.ports))
            self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        crowds = self._reached_from(transfer.ports)
        self._change(transfer, -1)
        transfer.end.succeed()
        self._share(crowds, transfer)

    def _sides(self, ports: tuple[Port, ...]) -> tuple[Port, Port]:
        """Return the server's port and the trainer's port."""
        first, second = ports
        return (first, second) if first[1] in self._servers else (second, first)

    def _crowd(self, port: Port) -> _Crowd:
        if port not in self._crowds:
            self._crowds[port] = _Crowd(port)
        return self._crowds[port]

    def _reached_from(self, ports: tuple[Port, ...]) -> list[_Crowd]:
        """Return all crowds whose users share a port with a transfer over ``ports``, directly or through others."""
        server, trainer = self._sides(ports)
        found = {server: self._crowd(server)} | {port: self._crowds[port] for port in map(self._server_of, self._users.get(trainer, ()))}
        waiting = [crowd for crowd in found.values() if crowd.beside]
        while waiting:
            for port in waiting.pop().beside:
                if port not in found:
                    found[port] = self._crowds[port]
                    waiting.append(found[port])
        return list(found.values())

    def _server_of(self, transfer: Transfer) -> Port:
        return self._sides(transfer.ports)[0]

    def _change(self, transfer: Transfer, more: int) -> None:
        """Make a transfer a user of its ports (``more`` = 1), or remove it from them (-1)."""
        server, trainer = self._sides(transfer.ports)
        users = self._users.setdefault(trainer, {})
        for other in users:
            self._link(server, self._server_of(other), more)
        self._trainers_ports[len(users)] -= 1
        for port in transfer.ports:
            if more > 0:
                self._users.setdefault(port, {})[transfer] = None
            else:
                del self._users[port][transfer]
        self._trainers_ports[len(users)] += 1
        self._most = max(self._most, len(users))
        while self._most and self._trainers_ports[self._most] <= 0:
            self._most -= 1

    def _link(self, one: Port, other: Port, more: int) -> None:
        if one == other:
            return
        for port, beside in ((one, other), (other, one)):
            crowd = self._crowd(port)
            crowd.beside[beside] += more
            if not crowd.beside[beside]:
                del crowd.beside[beside]

    def _settle(self, crowds: list[_Crowd]) -> None:
        """Finish the transfers that end now, before anything else changes."""
        due: list[Transfer] = []
        for crowd in crowds:
            while crowd.next_due_ns() == self._clock.now:
                due.append(heapq.heappop(crowd.waiting)[2])
        for transfer in due:
            transfer.due_ns = self._clock.now
        for transfer in due:
            self._finish(transfer)

    def _ring(self, crowd: _Crowd, timer: Event) -> None:
        if timer is crowd.timer:  # else another start or end has moved this end
            self._settle(self._reached_from(crowd.waiting[0][2].ports))

    def _share(self, crowds: list[_Crowd], origin: Transfer) -> None:
        """Set the speeds of all users of ``crowds`` from now on, after ``origin`` has started or ended."""
        busy = []
        for crowd in crowds:
            if self._users.get(crowd.port):
                busy.append(crowd)
            else:
                crowd.apart, crowd.timer = True, None
        if len(busy) == 1 or all(len(self._users[crowd.port]) > self._most for crowd in busy):
            for crowd in busy:
                self._gather(crowd, origin)
            return
        for crowd in busy:
            self._disperse(crowd)
        self._share_among({user: None for user in self._connected(origin) if not user.end.triggered})

    def _gather(self, crowd: _Crowd, origin: Transfer) -> None:
        """Let all users of a port progress together; ``origin`` has started or ended."""
        now_ns, users = self._clock.now, self._users[crowd.port]
        if crowd.apart:
            crowd.apart, crowd.done_ns, crowd.since_ns, crowd.waiting = False, Fraction(0), now_ns, []
            for user in users:
                if user.due_ns != now_ns:
                    self._integrate(user)
                    user.timer = user.due_ns = None
                    crowd.add(user, next(self._numbers))
        else:
            crowd.advance(now_ns)
            if origin in users:
                crowd.add(origin, next(self._numbers))
        crowd.num, crowd.timer = len(users), None
        if (due_ns := crowd.next_due_ns()) is not None:
            crowd.timer = timer = self._clock.timeout(due_ns - now_ns)
            timer.callbacks.append(partial(self._ring, crowd))

    def _disperse(self, crowd: _Crowd) -> None:
        """Let each user of a port progress on its own; ``_share_among`` sets its timer."""
        if crowd.apart:
            return
        crowd.advance(self._clock.now)
        for end, _, user in crowd.waiting:
            user.remaining_ns, user.since_ns = end - crowd.done_ns, self._clock.now
        crowd.apart, crowd.timer, crowd.waiting = True, None, []


Arrived = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts on which trainers and servers run, and the link of every host, with its full rate in each direction."""

    trainers: tuple[int, ...]
    """Number of the host of every trainer, and of its sender."""
    servers: tuple[int, ...]
    link: Link


class Wires:
    """Carries messages: ``send`` returns at once, and its callback is called when the message has arrived."""

    def __init__(self, clock: Clock, hosts: Hosts) -> None:
        self._clock = clock
        self._hosts = hosts
        apart = set(hosts.servers).isdisjoint(hosts.trainers)
        self._ports = ServerPorts(clock, hosts.servers) if apart else SharedPorts(clock)
        self._connections: defaultdict[Hashable, deque[tuple[int, Arrived]]] = defaultdict(deque)
        """Messages of each connection, as bytes and callback; the first is under way."""
        self._alone_ns: dict[int, Fraction] = {}
        """Time in ns that a message takes with its ports to itself, by its bytes."""

    def at_once(self, arrived: Arrived) -> None:
        """Deliver a message inside a host, at the current time."""
        self._clock.timeout(0).callbacks.append(lambda _: arrived())

    def send(self, connection: Hashable, source: int, target: int, nbytes: int, arrived: Arrived) -> None:
        """Send ``nbytes`` from host ``source`` to host ``target``, after all that ``connection`` carries already."""
        if source == target:
            self.at_once(arrived)
            return
        line, link = self._connections[connection], self._hosts.link
        if not nbytes and not line:  # it takes nothing of the link's rate
            self._clock.timeout(link.latency).callbacks.append(lambda _: arrived())
            return
        line.append((nbytes, arrived))
        if len(line) == 1:
            self._carry(line, source, target)

    def _carry(self, line: deque[tuple[int, Arrived]], source: int, target: int) -> None:
        nbytes, arrived = line[0]
        link = self._hosts.link
        if nbytes not in self._alone_ns:
            self._alone_ns[nbytes] = Fraction(nbytes * BITS_NS, link.bandwidth)

        def sent(_event: object) -> None:
            self._clock.timeout(link.latency).callbacks.append(lambda _: arrived())
            line.popleft()
            if line:
                self._carry(line, source, target)

        ports: tuple[Port, ...] = (("inter", source, "out"), ("inter", target, "in"))
        self._ports.transfer(ports, self._alone_ns[nbytes]).callbacks.append(sent)
