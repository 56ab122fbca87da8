"""Layout: process groups as arrays of ranks, and what collectives take in each part of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from fleetbench.plan.build import Plan
from fleetbench.plan.groups import Parts
from fleetbench.plan.operations import Operation, wire_bytes
from sim.arrays.event_loop import Meetings
from sim.clock import half_up
from sim.network.links import Port
from sim.network.routes import Routes
from sim.network.work import Route

Times = npt.NDArray[np.int64]
"""Nanoseconds, a row for each block of steps; a column for each rank or part, or one column where all have the same."""

NEVER = -(2**62)
"""Before every time: what a rank waits for that waits for nothing."""
LATER = 2**62
"""After every time."""


class Group:
    """The parts of a group in which there is somebody to meet."""

    def __init__(self, parts: Parts, num_ranks: int) -> None:
        self.parts = tuple(part for part in parts if len(part) > 1)
        sizes = [len(part) for part in self.parts]
        self._order = np.fromiter(chain.from_iterable(self.parts), dtype=np.int64, count=sum(sizes))
        self._begins = np.cumsum([0, *sizes], dtype=np.int64)[:-1]
        self.part_of = np.full(num_ranks, -1, dtype=np.int64)
        """The part of every rank; -1: in none."""
        self.part_of[self._order] = np.repeat(np.arange(len(sizes)), sizes)
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.members = self.part_of >= 0
        self.has_all = len(self._order) == num_ranks
        self.is_whole = self.has_all and len(sizes) == 1
        """All ranks are in one part."""
        self._is_sorted = self.has_all and bool((self._order == np.arange(num_ranks)).all())

    def latest(self, values: Times) -> Times:
        """The largest value among each part's ranks, from one a rank."""
        if self.is_whole:
            return np.asarray(values.max(axis=1, keepdims=True))
        inside = values if self._is_sorted else values[:, self._order]
        return np.asarray(np.maximum.reduceat(inside, self._begins, axis=1))

    def to_ranks(self, values: Times) -> Times:
        """The values of the parts, for each of their ranks; ``NEVER`` for ranks in no part."""
        of_ranks = values if values.shape[1] == 1 else values[:, self.part_of]
        return of_ranks if self.has_all else np.where(self.members, of_ranks, NEVER)

    def latest_of(self, other: Group, values: Times) -> Times:
        """For each part, the largest value of those parts of another group that share a rank with it; ``NEVER`` where none does."""
        return self.latest(np.broadcast_to(other.to_ranks(values), (len(values), len(self.part_of))))

    def crosses(self, other: Group) -> bool:
        """Whether each part has a rank of each part of the other."""
        pairs = {pair for pair in zip(self.part_of.tolist(), other.part_of.tolist(), strict=True) if min(pair) >= 0}
        return len(pairs) == len(self.parts) * len(other.parts)


class Layout:
    """A plan's groups over arrays of its trainers, and the links between them."""

    def __init__(self, plan: Plan, routes: Routes) -> None:
        self.num_ranks = plan.trainers
        self.queue_depth = plan.queue_depth
        self.routes = routes
        self.groups = {name: Group(parts, plan.trainers) for name, parts in plan.parts.items()}
        self._full: dict[tuple[str, str], bool] = {}
        self._taken: dict[tuple[str, str, bool, int], Times] = {}
        self._ports: dict[tuple[str, str, bool], frozenset[Port]] = {}

    def is_full(self, first: str, second: str) -> bool:
        """Whether each part of the one group has a rank of each part of the other."""
        if (first, second) not in self._full:
            self._full[first, second] = self.groups[first].crosses(self.groups[second])
        return self._full[first, second]

    def ways(self, operation: Operation) -> list[Route]:
        """Time and ports of a collective in each part of its group."""
        return [self.routes.of(operation, part) for part in self.groups[operation.group].parts]

    def ports(self, operation: Operation) -> frozenset[Port]:
        """All ports that a collective passes, in any part of its group."""
        key = operation.group, operation.kind, operation.payload == "rows"
        if key not in self._ports:
            self._ports[key] = frozenset(port for route in self.ways(operation) for port in route.ports)
        return self._ports[key]

    def takes_ns(self, operation: Operation) -> Times:
        """Time of a collective in each part: shape ``(1, num_parts)``, or ``(1, 1)`` where there is one.

        It is alone on its links but for its other parts, which start with it.
        """
        key = (operation.group, operation.kind, operation.payload == "rows", operation.nbytes)
        if key not in self._taken:
            ways = self.ways(operation)
            self._taken[key] = np.asarray([self._together_ns(ways) if share_ports(ways) else [alone_ns(route) for route in ways]])
        return self._taken[key]

    def _together_ns(self, routes: Sequence[Route]) -> list[int]:
        """Times of collectives that start together on idle links."""
        queues = [[meeting] for meeting in range(len(routes))]
        return Meetings(routes, queues, self.routes.links).carry([0] * len(routes))[1]

    def bytes_sent(self, operation: Operation) -> npt.NDArray[np.object_]:
        """Bytes that each rank sends, or of all ranks where they send the same; of any size."""
        group = self.groups[operation.group]
        sent = [wire_bytes(operation, len(part)) for part in group.parts]
        if group.has_all and len(set(sent)) == 1:
            return np.asarray(sent[:1], dtype=object)
        return np.asarray([*sent, 0], dtype=object)[group.part_of]


def share_ports(ways: Sequence[Route]) -> bool:
    """Whether any two have a port in common."""
    return len({port for way in ways for port in way.ports}) < sum(len(way.ports) for way in ways)


def alone_ns(route: Route) -> int:
    """Time of a collective that has all its ports to itself."""
    return int(route.cost.latency_ns) + half_up(route.cost.transfer_ns)
