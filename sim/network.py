"""Network: carries collectives over the cluster's links, alone and beside others.

A collective spends its latency first, which nothing slows, and then its transfer, at the share of
its ports that other transfers leave it. Collectives inside two nodes share nothing; all that cross
nodes share the nodes' links.
"""

from __future__ import annotations

from collections.abc import Generator

from simpy import Event

from fleetbench.plan.operations import COLLECTIVES, Operation
from sim.algorithms import Cost, Links, Port, Ring
from sim.clock import Clock
from sim.sharing import SharedPorts


class Network:
    """The cluster's links, as collectives see them."""

    def __init__(self, clock: Clock, links: Links) -> None:
        self._clock = clock
        self._links = links
        self._ports = SharedPorts(clock)
        self._rings: dict[tuple[int, ...], Ring] = {}
        self._known: dict[tuple[tuple[int, ...], str, bool, int], tuple[Cost, tuple[Port, ...]]] = {}

    def carry(self, operation: Operation, ranks: tuple[int, ...]) -> Generator[Event, object, None]:
        """Carry out a collective among ``ranks``."""
        cost, ports = self._cost(operation, ranks)
        yield self._clock.timeout(cost.latency_ns)
        yield self._ports.transfer(ports, cost.transfer_ns)

    def _cost(self, operation: Operation, ranks: tuple[int, ...]) -> tuple[Cost, tuple[Port, ...]]:
        kind, payload = operation.kind, operation.payload
        key = (ranks, kind, payload == "rows", operation.nbytes)
        if key not in self._known:
            assert kind in COLLECTIVES
            if ranks not in self._rings:
                self._rings[ranks] = Ring(ranks, self._links)
            ring = self._rings[ranks]
            self._known[key] = (ring.cost(kind, operation.nbytes, payload), ring.ports(kind))  # type: ignore[arg-type]  # a collective's kind
        return self._known[key]
