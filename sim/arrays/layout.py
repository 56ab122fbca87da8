"""Layout: what of a scenario arrays are laid out by: groups, and what collectives take in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fleetbench.plan.groups import Parts
from fleetbench.plan.operations import Operation, wire_bytes
from sim.arrays.groups import Groups, Times
from sim.clock import half_up
from sim.network.routes import Routes
from sim.network.sharing import fair_speeds
from sim.network.work import Route
from sim.scenario import Scenario


@dataclass(slots=True)
class Layout:
    """The ranks of some lanes, and the links between the trainers that they stand for."""

    groups: Groups
    parts: dict[str, Parts]
    """Trainers that meet in each part of a group."""
    num_ranks: int
    queue_depth: int
    routes: Routes
    _taken: dict[tuple[str, str, bool, int], Times] = field(default_factory=dict)

    @classmethod
    def of(cls, scenario: Scenario, routes: Routes) -> Layout:
        """A lane for every trainer."""
        plan = scenario.plan
        return cls(Groups(plan.parts, plan.trainers), plan.parts, plan.trainers, plan.queue_depth, routes)

    def ways(self, operation: Operation) -> list[Route]:
        """What a collective takes in each part of its group, and which ports."""
        return [self.routes.of(operation, part) for part in self.parts[operation.group] if len(part) > 1]

    def takes_ns(self, operation: Operation) -> Times:
        """What a collective takes in each part: shape ``(1, num_parts)``, or ``(1, 1)`` where all take the same.

        It is alone on its links but for its other parts, which start and end with it; see ``together_ns``.
        """
        key = (operation.group, operation.kind, operation.payload == "rows", operation.nbytes)
        if key not in self._taken:
            ways = self.ways(operation)
            taken = np.asarray([[alone_ns(route) for route in ways]])
            if share_ports(ways) and (together_ns := self.together_ns(operation)) is not None:
                taken[:] = together_ns
            self._taken[key] = taken[:, :1] if len(self.groups[operation.group].parts) == 1 else taken
        return self._taken[key]

    def together_ns(self, operation: Operation) -> int | None:
        """What a collective takes in all of its parts, which start together and may share ports; none where they end apart."""
        links, ways = self.routes.links, self.ways(operation)
        flows, capacity = {index: way.flow for index, way in enumerate(ways)}, links.capacity
        speeds = fair_speeds({index: way.ports for index, way in enumerate(ways)}, capacity, flows)
        costs = {(way.cost.latency_ns, way.cost.transfer_ns / speeds[index]) for index, way in enumerate(ways)}
        if len(costs) > 1 or links.in_flight or any(half_up(way.cost.transfer_ns) == 0 for way in ways):
            return None
        ((latency_ns, transfer_ns),) = costs
        return latency_ns + half_up(transfer_ns)

    def bytes_sent(self, operation: Operation) -> list[int]:
        """Bytes that each rank sends, or of all ranks where they send the same."""
        group = self.groups[operation.group]
        sent = [wire_bytes(operation, len(part)) for part in self.parts[operation.group] if len(part) > 1]
        if group.has_all and len(set(sent)) == 1:
            return sent[:1]
        return [sent[part] if part >= 0 else 0 for part in group.part_of.tolist()]


def share_ports(ways: Sequence[Route]) -> bool:
    """Whether any two have a port in common."""
    return len({port for way in ways for port in way.ports}) < sum(len(way.ports) for way in ways)


def alone_ns(route: Route) -> int:
    """A collective that meets nobody on its ports."""
    return int(route.cost.latency_ns) + half_up(route.cost.transfer_ns)
