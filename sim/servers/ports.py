"""Server ports: transfers between hosts of trainers and hosts of servers share links at a cost that does not grow with their number.

A connection of ``Wires`` carries its messages one after the other; connections that have a host's link in common share it (max-min; see
``sim.network.sharing``). A message arrives a link's latency after its last byte, and at once between two processes of one host.

Every transfer passes one port of a server and one of a trainer's host. Where servers' ports have more users than trainers' ports, the
max-min fair speed is one n-th of the server's port for each of its n users. So a single number, how far a user has come that was there
from the beginning, stands for all users of a port, and the next to end is the first of a heap. ``SharedPorts`` visits all users at every
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
    """The users of a server's port.

    It begins ``apart``, when each user has a timer of its own in ``SharedPorts``; then all users progress together.
    """

    port: Port
    beside: Counter[Port] = field(default_factory=Counter)
    """Other servers' ports, by the number of pairs of transfers that share a trainer's port."""
    apart: bool = True
    done_ns: Fraction = Fraction(0)
    """Progress of a user that was there from the beginning, at the speed alone."""
    since_ns: int = 0
    num: int = 1
    """Users since then."""
    waiting: list[tuple[Fraction, int, Transfer]] = field(default_factory=list)
    """A heap: at which ``done_ns`` a transfer ends, a number, and the transfer."""
    timer: Event | None = None
    """Goes off when the first of them ends."""

    def advance(self, now_ns: int) -> None:
        """All users come to ``now_ns``."""
        self.done_ns += Fraction(now_ns - self.since_ns, self.num)
        self.since_ns = now_ns

    def add(self, transfer: Transfer, number: int) -> None:
        """A transfer is a user from now on."""
        heapq.heappush(self.waiting, (self.done_ns + transfer.remaining_ns, number, transfer))

    def next_due_ns(self) -> int | None:
        """When the first user ends, rounded once; see ``SharedPorts``."""
        if not self.waiting:
            return None
        return self.since_ns + max(half_up((self.waiting[0][0] - self.done_ns) * self.num), 0)


class ServerPorts(SharedPorts):
    """``SharedPorts`` for transfers of which each passes one port of a server's host, on which no trainer is."""

    def __init__(self, clock: Clock, servers: Collection[int]) -> None:
        super().__init__(clock)
        self._servers = frozenset(servers)
        self._crowds: dict[Port, _Crowd] = {}
        self._numbers = count()
        self._trainers_ports = Counter[int]()
        """Trainers' ports by the number of their users."""
        self._most = 0
        """Users of a trainer's port, at most."""

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
        """The server's port and the trainer's."""
        first, second = ports
        return (first, second) if first[1] in self._servers else (second, first)

    def _crowd(self, port: Port) -> _Crowd:
        if port not in self._crowds:
            self._crowds[port] = _Crowd(port)
        return self._crowds[port]

    def _reached_from(self, ports: tuple[Port, ...]) -> list[_Crowd]:
        """All crowds whose users share a port with a transfer over ``ports``, directly or not."""
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
        """A transfer becomes a user of its ports, or is one no longer."""
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
        """From now on, all that share have the speeds that their numbers leave them."""
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
        """All users of a port progress together."""
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
        """Each user of a port has its own timer."""
        if crowd.apart:
            return
        crowd.advance(self._clock.now)
        for end, _, user in crowd.waiting:
            user.remaining_ns, user.since_ns = end - crowd.done_ns, self._clock.now
        crowd.apart, crowd.timer, crowd.waiting = True, None, []


Arrived = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where trainers and servers live, and the links of hosts, each way."""

    trainers: tuple[int, ...]
    """Host of every trainer, and of its sender."""
    servers: tuple[int, ...]
    link: Link


class Wires:
    """Carries messages; ``send`` returns at once, and what it is given is called when the message has arrived."""

    def __init__(self, clock: Clock, hosts: Hosts) -> None:
        self._clock = clock
        self._hosts = hosts
        apart = set(hosts.servers).isdisjoint(hosts.trainers)
        self._ports = ServerPorts(clock, hosts.servers) if apart else SharedPorts(clock)
        self._connections: defaultdict[Hashable, deque[tuple[int, Arrived]]] = defaultdict(deque)
        """Messages of each, by their bytes; the first is under way."""
        self._alone_ns: dict[int, Fraction] = {}
        """Nanoseconds that a message takes alone, by its bytes."""

    def at_once(self, arrived: Arrived) -> None:
        """A message within a process."""
        self._clock.timeout(0).callbacks.append(lambda _: arrived())

    def send(self, connection: Hashable, source: int, target: int, nbytes: int, arrived: Arrived) -> None:
        """``nbytes`` from host ``source`` to host ``target``, after what ``connection`` carries already."""
        if source == target:
            self.at_once(arrived)
            return
        line, link = self._connections[connection], self._hosts.link
        if not nbytes and not line:  # it takes no other message's part of a link
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
