"""Network: carries collectives over the cluster's links, alone and beside others.

A collective spends its latency first and then its transfer, at the share of its ports that other
transfers leave it; both slower where its ranks' compute slows it. Latencies share nothing, unless
several in flight were measured to. Collectives inside two nodes share nothing; all that cross nodes
share the nodes' links.
"""

from __future__ import annotations

from collections.abc import Generator
from fractions import Fraction

from simpy import Event

from fleetbench.plan.operations import Operation
from sim.algorithms import LATENCY, Links, Port
from sim.clock import Clock
from sim.computing import Computing
from sim.routes import Routes
from sim.sharing import SharedPorts


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
        cost, ports = self._routes.of(operation, ranks)
        if not self._computing.slows and not self._links.in_flight:
            yield self._clock.timeout(cost.latency_ns)
            yield self._ports.transfer(ports, cost.transfer_ns)
            return
        latency = tuple((name + LATENCY, number, way) for name, number, way in ports)
        for passes, takes_ns in ((latency, Fraction(cost.latency_ns)), (ports, cost.transfer_ns)):
            if takes_ns:
                yield from self._paced(passes, takes_ns, ranks)

    def _paced(self, ports: tuple[Port, ...], alone_ns: Fraction, ranks: tuple[int, ...]) -> Generator[Event, object, None]:
        """One part of a collective, at the pace that its ranks' compute leaves it."""
        transfer = self._ports.start(ports, alone_ns, self._computing.pace(ranks))
        with self._computing.watching(ranks, lambda pace: self._ports.repace(transfer, pace)):
            yield transfer.end
