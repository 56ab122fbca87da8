"""Network: carries collectives over the cluster's links, alone and beside others.

A collective spends its latency first and then its transfer, at the share of its ports that other
transfers leave it; both slower where its ranks' compute slows it. Latencies share nothing, unless
several in flight were measured to. Collectives inside two nodes share nothing; those that cross nodes
share the nodes' interfaces, and those that cross racks their uplinks.
"""

from __future__ import annotations

from collections.abc import Generator
from fractions import Fraction

from simpy import Event

from fleetbench.plan.operations import Operation
from sim.clock import Clock
from sim.computing import Computing
from sim.links import LATENCY, Links, Port
from sim.routes import Routes
from sim.sharing import SharedPorts
from sim.work import Flow


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
            if takes_ns:
                yield from self._paced(passes, takes_ns, flow, ranks)

    def _paced(
        self, ports: tuple[Port, ...], alone_ns: Fraction, flow: Flow | None, ranks: tuple[int, ...]
    ) -> Generator[Event, object, None]:
        """One part of a collective, at the pace that its ranks' compute leaves it."""
        transfer = self._ports.start(ports, alone_ns, self._computing.pace(ranks), flow)
        with self._computing.watching(ranks, lambda pace: self._ports.repace(transfer, pace)):
            yield transfer.end
