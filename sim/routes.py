"""Routes: what every collective of a run takes alone, and which ports it keeps busy; no clock is in it."""

from __future__ import annotations

from fleetbench.plan.operations import COLLECTIVES, Operation
from sim.algorithms import Cost, Links, Port, Ring

Way = tuple[Cost, tuple[Port, ...]]
"""What a collective takes with its ports for itself, and those ports."""


class Routes:
    """The ways of collectives over a cluster's links, each worked out once.

    A collective that meets nobody on its ports ends ``cost.latency_ns + half_up(cost.transfer_ns)`` behind its start.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self._rings: dict[tuple[int, ...], Ring] = {}
        self._known: dict[tuple[tuple[int, ...], str, bool, int], Way] = {}

    def of(self, operation: Operation, ranks: tuple[int, ...]) -> Way:
        """The cost of ``operation`` among ``ranks``, and the ports it uses."""
        kind, payload = operation.kind, operation.payload
        key = (ranks, kind, payload == "rows", operation.nbytes)
        if key not in self._known:
            assert kind in COLLECTIVES
            if ranks not in self._rings:
                self._rings[ranks] = Ring(ranks, self.links)
            ring = self._rings[ranks]
            self._known[key] = (ring.cost(kind, operation.nbytes, payload), ring.ports(kind))  # type: ignore[arg-type]  # a collective's kind
        return self._known[key]
