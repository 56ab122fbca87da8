"""Routes: what every collective of a run takes alone, and which ports it keeps busy; no clock is in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fleetbench.plan.operations import COLLECTIVES, Collective, Operation
from sim.algorithms import ALGORITHMS, Ranks, ring
from sim.gloo import gloo
from sim.links import Links
from sim.measured import MeasuredAllReduce
from sim.nccl import GENERATIONS, Nccl
from sim.work import Route

__all__ = ["Route", "Routes", "Way", "way"]


class Way(Protocol):
    """One kind of collective among some ranks, of any size."""

    def route(self, nbytes: int) -> Route:
        """What it takes with ``nbytes`` in every rank's buffer."""
        ...


class Routes:
    """The ways of collectives over a cluster's links, each worked out once.

    A collective that meets nobody on its ports ends ``cost.latency_ns + half_up(cost.transfer_ns)`` behind its start.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self._ways: dict[tuple[tuple[int, ...], str, bool], Way] = {}
        self._known: dict[tuple[tuple[int, ...], str, bool, int], Route] = {}

    def of(self, operation: Operation, ranks: tuple[int, ...]) -> Route:
        """The way of ``operation`` among ``ranks``, of which the first is the root."""
        kind, rows = operation.kind, operation.payload == "rows"
        key = (ranks, kind, rows, operation.nbytes)
        if key not in self._known:
            assert kind in COLLECTIVES
            if key[:3] not in self._ways:
                self._ways[key[:3]] = way(kind, ranks, self.links, rows=rows)  # type: ignore[arg-type]  # a collective's kind
            self._known[key] = self._ways[key[:3]].route(operation.nbytes)
        return self._known[key]


def way(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Way:
    """What ``links.collective`` does for such a collective."""
    name = links.collective
    if name == "measured":
        if kind == "all_reduce":
            return MeasuredAllReduce(links.points_among(len(ranks)), ranks, links)
        return ring(kind, ranks, links, rows=rows)
    if name == "gloo":
        return gloo(kind, ranks, links, rows=rows)
    if name in GENERATIONS:
        return Nccl(GENERATIONS[name], kind, ranks, links, rows=rows)
    algorithm: Callable[..., Way] = ALGORITHMS[name]
    return algorithm(kind, ranks, links, rows=rows)
