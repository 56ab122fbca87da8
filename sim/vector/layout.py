"""Layout: what of a scenario arrays are laid out by: groups, and what collectives take in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from fleetbench.plan.groups import Parts
from fleetbench.plan.operations import Operation, wire_bytes
from sim.clock import half_up
from sim.routes import Route, Routes
from sim.scenario import Scenario
from sim.vector.groups import Groups, Times


@dataclass(slots=True)
class Layout:
    """The ranks of some lanes, and the links between the trainers that they stand for."""

    groups: Groups
    parts: dict[str, Parts]
    """Trainers that meet in each part of a group."""
    num_ranks: int
    queue_depth: int
    routes: Routes
    speeds: dict[tuple[int, int], tuple[Fraction, Fraction]] = field(default_factory=dict)
    """Of so many in flight on one way, by the identity of its flow: their speed, and that of their latency; see ``sim.vector.shared``."""
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
        """What a collective takes, alone on its links, in each part: shape ``(1, num_parts)``, or ``(1, 1)`` where all take the same."""
        key = (operation.group, operation.kind, operation.payload == "rows", operation.nbytes)
        if key not in self._taken:
            taken = np.asarray([[alone_ns(route) for route in self.ways(operation)]])
            self._taken[key] = taken[:, :1] if len(self.groups[operation.group].parts) == 1 else taken
        return self._taken[key]

    def bytes_sent(self, operation: Operation) -> list[int]:
        """Bytes that each rank sends, or of all ranks where they send the same."""
        group = self.groups[operation.group]
        sent = [wire_bytes(operation, len(part)) for part in self.parts[operation.group] if len(part) > 1]
        if group.has_all and len(set(sent)) == 1:
            return sent[:1]
        return [sent[part] if part >= 0 else 0 for part in group.part_of.tolist()]


def alone_ns(route: Route) -> int:
    """A collective that meets nobody on its ports."""
    return int(route.cost.latency_ns) + half_up(route.cost.transfer_ns)
