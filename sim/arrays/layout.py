"""Layout: process groups as arrays of ranks, and how long collectives take in each part of a group."""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from fleetbench.plan.build import Plan
from fleetbench.plan.groups import Parts
from fleetbench.plan.operations import Operation, wire_bytes
from sim.clock import half_up
from sim.network.links import Port
from sim.network.routes import Routes
from sim.network.work import Route

Times = npt.NDArray[np.int64]
"""Times in ns, with one row per block of steps. Columns are ranks or parts of a group; there is one column if
all have the same time."""

NEVER = -(2**62)
"""Time before all others: the end of a wait for nothing."""
LATER = 2**62
"""Time after all others."""


class Group:
    """The parts of a process group that have at least two ranks."""

    def __init__(self, parts: Parts, num_ranks: int) -> None:
        self.parts = tuple(part for part in parts if len(part) > 1)
        sizes = [len(part) for part in self.parts]
        self._order = np.fromiter(chain.from_iterable(self.parts), dtype=np.int64, count=sum(sizes))
        self._begins = np.cumsum([0, *sizes], dtype=np.int64)[:-1]
        self.part_of = np.full(num_ranks, -1, dtype=np.int64)
        """Index of each rank's part; -1 for a rank in no part."""
        self.part_of[self._order] = np.repeat(np.arange(len(sizes)), sizes)
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.members = self.part_of >= 0
        self.has_all = len(self._order) == num_ranks
        self.is_whole = self.has_all and len(sizes) == 1
        """Whether all ranks are in one part."""
        self._is_sorted = self.has_all and bool((self._order == np.arange(num_ranks)).all())

    def latest(self, values: Times) -> Times:
        """Return the largest value among each part's ranks; ``values`` has one column per rank."""
        if self.is_whole:
            return np.asarray(values.max(axis=1, keepdims=True))
        inside = values if self._is_sorted else values[:, self._order]
        return np.asarray(np.maximum.reduceat(inside, self._begins, axis=1))

    def to_ranks(self, values: Times) -> Times:
        """Return for each rank the value of its part; ``NEVER`` for ranks in no part."""
        of_ranks = values if values.shape[1] == 1 else values[:, self.part_of]
        return of_ranks if self.has_all else np.where(self.members, of_ranks, NEVER)

    def latest_of(self, other: Group, values: Times) -> Times:
        """Return for each part the largest value among parts of ``other`` that share a rank with it, or ``NEVER``.

        ``values`` has one column per part of ``other``.
        """
        return self.latest(np.broadcast_to(other.to_ranks(values), (len(values), len(self.part_of))))

    def crosses(self, other: Group) -> bool:
        """Whether each part shares a rank with each part of ``other``."""
        pairs = {pair for pair in zip(self.part_of.tolist(), other.part_of.tolist(), strict=True) if min(pair) >= 0}
        return len(pairs) == len(self.parts) * len(other.parts)


class Layout:
    """A plan's groups as arrays of ranks, and the routes of their collectives."""

    def __init__(self, plan: Plan, routes: Routes) -> None:
        self.num_ranks = plan.trainers
        self.queue_depth = plan.queue_depth
        self.routes = routes
        self.groups = {name: Group(parts, plan.trainers) for name, parts in plan.parts.items()}
        self._full: dict[tuple[str, str], bool] = {}
        self._taken: dict[tuple[str, str, bool, int], Times] = {}
        self._ports: dict[tuple[str, str, bool], frozenset[Port]] = {}

    def is_full(self, first: str, second: str) -> bool:
        """Whether each part of group ``first`` shares a rank with each part of group ``second``."""
        if (first, second) not in self._full:
            self._full[first, second] = self.groups[first].crosses(self.groups[second])
        return self._full[first, second]

    def ways(self, operation: Operation) -> list[Route]:
        """Return the route of a collective, its time and ports, in each part of its group."""
        return [self.routes.of(operation, part) for part in self.groups[operation.group].parts]

    def ports(self, operation: Operation) -> frozenset[Port]:
        """Return all ports that a collective passes, in any part of its group."""
        key = operation.group, operation.kind, operation.payload == "rows"
        if key not in self._ports:
            self._ports[key] = frozenset(port for route in self.ways(operation) for port in route.ports)
        return self._ports[key]

    def takes_ns(self, operation: Operation) -> Times:
        """Return the time in ns of a collective in each part, shape ``(1, num_parts)``.

        No other collective or part uses its links.
        """
        key = (operation.group, operation.kind, operation.payload == "rows", operation.nbytes)
        if key not in self._taken:
            self._taken[key] = np.asarray([[alone_ns(route) for route in self.ways(operation)]])
        return self._taken[key]

    def bytes_sent(self, operation: Operation) -> npt.NDArray[np.object_]:
        """Return the bytes that each rank sends, as Python integers of any size.

        The shape is ``(num_ranks,)``, or ``(1,)`` if all ranks send the same.
        """
        group = self.groups[operation.group]
        sent = [wire_bytes(operation, len(part)) for part in group.parts]
        if group.has_all and len(set(sent)) == 1:
            return np.asarray(sent[:1], dtype=object)
        return np.asarray([*sent, 0], dtype=object)[group.part_of]


def alone_ns(route: Route) -> int:
    """Return the time in ns of a collective that has all its ports to itself."""
    return int(route.cost.latency_ns) + half_up(route.cost.transfer_ns)
