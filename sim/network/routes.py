"""Routes: the time of every collective of a run on idle links, and the ports that it keeps busy; there is no clock."""

import dataclasses
from fractions import Fraction

from fleetbench.plan.operations import Collective, Operation
from sim.network.algorithms import Ranks, ring
from sim.network.gloo import SegmentedRing, gloo
from sim.network.links import Links
from sim.network.measured import Measured, MeasuredNccl
from sim.network.nccl import GENERATIONS, Nccl
from sim.network.work import Cost, Route, Work

Way = Work | SegmentedRing | Measured | Nccl | MeasuredNccl
"""Model of one kind of collective among some ranks. Its ``route`` returns the time and the ports for a number
of bytes in every rank's buffer."""


class Routes:
    """Routes of collectives over a cluster's links, each computed once.

    A collective with all its ports to itself ends ``cost.latency_ns + half_up(cost.transfer_ns)`` after its
    start.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self._ways: dict[tuple[str, bool, tuple[int, ...], int], Way] = {}
        self._known: dict[tuple[object, ...], Route] = {}
        self._quantise_ns = Fraction(0 if links.measured is None else links.measured.quantise, 10**6)
        """Time in ns to quantise a byte to INT8 and back."""

    def of(self, operation: Operation, ranks: tuple[int, ...]) -> Route:
        """Return the route of ``operation`` among ``ranks``; the first rank is the root."""
        kind, rows = operation.kind, operation.payload == "rows"
        key = (kind, rows, ranks, operation.communicator)
        sized = (*key, operation.nbytes, operation.wire_dtype)
        if sized not in self._known:
            if key not in self._ways:
                links = dataclasses.replace(self.links, communicator=key[-1])
                self._ways[key] = way(kind, ranks, links, rows=rows)  # type: ignore[arg-type]  # a collective's kind
            found = self._ways[key].route(operation.nbytes)
            if operation.wire_dtype == "int8":
                more_ns = round(self._quantise_ns * operation.nbytes)
                cost = Cost(found.cost.latency_ns + more_ns, found.cost.transfer_ns)
                found = dataclasses.replace(found, cost=cost, first_ns=found.first_ns + more_ns)
            self._known[sized] = found
        return self._known[sized]


def way(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Way:
    """Return the model that ``links.collective`` names, for this kind of collective among ``ranks``."""
    name = links.collective
    if name == "measured":
        points = () if rows else links.points_among(kind, len(ranks))  # sizes were measured of equal parts, not of rows
        return Measured(kind, points, ranks, links) if points else ring(kind, ranks, links, rows=rows)
    if name == "gloo":
        return gloo(kind, ranks, links, rows=rows)
    if name in GENERATIONS:
        if not rows and any(one.kind == kind for one in links.declared):
            return MeasuredNccl(kind, ranks, links)
        return Nccl(GENERATIONS[name], kind, ranks, links, rows=rows)
    return ring(kind, ranks, links, rows=rows)
