"""Wires: messages on their way between hosts.

A connection carries its messages one after the other; connections that have a host's link in common
share it (max-min; see ``sim.network.sharing``), so that many trainers that push at once get their part of the
server's link each. A message arrives a link's latency after its last byte. Between two processes of one
host it arrives at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from fractions import Fraction

from fleetbench.cluster import Link
from sim.clock import Clock
from sim.network.links import Port
from sim.network.sharing import SharedPorts
from sim.network.work import BITS_NS
from sim.servers.ports import ServerPorts

Arrived = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where trainers and servers live, and the links of hosts, each way."""

    trainers: tuple[int, ...]
    """Host of every trainer, and of its sender."""
    servers: tuple[int, ...]
    link: Link


@dataclass(slots=True)
class _Connection:
    waiting: deque[tuple[int, Arrived]] = field(default_factory=deque)
    busy: bool = False


class Wires:
    """Carries messages; ``send`` returns at once, and what it is given is called when the message has arrived."""

    def __init__(self, clock: Clock, hosts: Hosts) -> None:
        self._clock = clock
        self._hosts = hosts
        apart = set(hosts.servers).isdisjoint(hosts.trainers)
        self._ports = ServerPorts(clock, hosts.servers) if apart else SharedPorts(clock)
        self._connections: dict[Hashable, _Connection] = {}
        self._alone_ns: dict[int, Fraction] = {}
        """Of messages of so many bytes."""

    def at_once(self, arrived: Arrived) -> None:
        """A message within a process."""
        self._clock.timeout(0).callbacks.append(lambda _: arrived())

    def send(self, connection: Hashable, source: int, target: int, nbytes: int, arrived: Arrived) -> None:
        """``nbytes`` from host ``source`` to host ``target``, after what ``connection`` carries already."""
        if source == target:
            self.at_once(arrived)
            return
        line = self._connections.setdefault(connection, _Connection())
        link = self._hosts.link
        if not nbytes and not line.busy:  # it takes no other message's part of a link
            self._clock.timeout(link.latency).callbacks.append(lambda _: arrived())
            return
        line.waiting.append((nbytes, arrived))
        if not line.busy:
            self._carry(line, source, target)

    def _carry(self, line: _Connection, source: int, target: int) -> None:
        nbytes, arrived = line.waiting.popleft()
        line.busy = True
        link = self._hosts.link
        if nbytes not in self._alone_ns:
            self._alone_ns[nbytes] = Fraction(nbytes * BITS_NS, link.bandwidth)

        def sent(_event: object) -> None:
            self._clock.timeout(link.latency).callbacks.append(lambda _: arrived())
            if line.waiting:
                self._carry(line, source, target)
            else:
                line.busy = False

        ports: tuple[Port, ...] = (("inter", source, "out"), ("inter", target, "in"))
        self._ports.transfer(ports, self._alone_ns[nbytes]).callbacks.append(sent)
