"""Shared links: collectives of trainers that are in flight together and have ports in common; see ``event_loop``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from fleetbench.plan.operations import Operation
from sim.arrays.event_loop import Meetings
from sim.arrays.layout import Layout, Times, alone_ns
from sim.arrays.supported import SHARED, Unsupported
from sim.arrays.transfers import Flight, Transfers


class SharedTransfers(Transfers):
    """Carries collectives when somebody waits for one of them."""

    def __init__(self, layout: Layout, num_blocks: int, wires: dict[tuple[Operation, ...], Wires]) -> None:
        """``wires``: those known of operations that are joined together."""
        super().__init__(layout, num_blocks)
        self._wires = wires
        self._waiting: list[tuple[Operation, Times]] = []
        self._carried: list[tuple[Wires, Times]] = []
        """Ends that may be later than the next starts elsewhere."""
        self._finished = np.zeros((num_blocks, 1), dtype=np.int64)

    def begin(self, start: Times, num_ids: int) -> None:
        """See ``Transfers``."""
        self._carry()  # what goes on into this step has nothing beside it
        earliest = start.min(axis=1)
        self._carried = [(wires, ends) for wires, ends in self._carried if (ends > earliest).any()]
        super().begin(start, num_ids)

    def join(self, operation: Operation, ready: Times, opens_ns: int = 0) -> None:
        """See ``Transfers``."""
        _, ready = self._meet(operation, ready, opens_ns)
        self._waiting.append((operation, np.broadcast_to(ready, (self._num_blocks, len(self._layout.groups[operation.group].parts)))))

    def flights(self, after: tuple[int, ...] | None) -> list[Flight]:
        """See ``Transfers``."""
        self._carry()
        return super().flights(after)

    def finished(self) -> Times:
        """See ``Transfers``."""
        self._carry()
        return self._finished

    def _carry(self) -> None:
        if not self._waiting:
            return
        operations, times = zip(*self._waiting, strict=True)
        ready = np.concatenate(times, axis=1)
        self._waiting = []
        if operations not in self._wires:
            self._wires[operations] = Wires(self._layout, operations)
        wires = self._wires[operations]
        starts, ends = wires.carry(ready.T)
        if any(before.meets(wires, ended, starts) for before, ended in self._carried):
            raise Unsupported(SHARED)
        self._carried.append((wires, ends))
        for operation, own in zip(operations, wires.places, strict=True):
            self._step[operation.id] = Flight(operation, starts[own].T, ends[own].T, self._met[operation.id][1])
        self._finished = np.maximum(self._finished, ends.max(axis=0)[:, None])


class Wires:
    """What is known of operations that are joined together, before anybody joins: their meetings, and the loop that carries these.

    Raises ``Unsupported`` for a meeting that takes no nanosecond: which of several begins first within a nanosecond would matter.
    """

    def __init__(self, layout: Layout, operations: Sequence[Operation]) -> None:
        parts = [layout.groups[operation.group].parts for operation in operations]
        ends = list(accumulate(map(len, parts)))
        self.places = [slice(end - len(own), end) for end, own in zip(ends, parts, strict=True)]
        """The meetings of each operation."""
        routes = [route for operation in operations for route in layout.ways(operation)]
        if not all(map(alone_ns, routes)):
            raise Unsupported(SHARED)
        queues: dict[tuple[int, str, int], list[int]] = {}
        for operation, place in zip(operations, self.places, strict=True):
            for part, meeting in enumerate(range(place.start, place.stop)):
                queues.setdefault((operation.communicator, operation.group, part), []).append(meeting)
        followers = self._followers(layout, operations, len(routes))
        self._meetings = Meetings(routes, list(queues.values()), layout.routes.links, layout.queue_depth, followers)
        ports_of = {id(route.loads): set(route.ports) for route in routes}
        kinds = np.asarray([id(route.loads) for route in routes])
        self._of_kind = [(ports, np.flatnonzero(kinds == kind)) for kind, ports in ports_of.items()]

    def _followers(self, layout: Layout, operations: Sequence[Operation], num: int) -> list[list[int]]:
        """Which meetings come after each: those of operations after its own that a rank of its part is in."""
        place = {operation.id: index for index, operation in enumerate(operations)}
        found: list[list[int]] = [[] for _ in range(num)]
        for operation, own in zip(operations, self.places, strict=True):
            for before in (place[other] for other in operation.after if other in place):
                part_of = layout.groups[operations[before].group].part_of
                for meeting, part in enumerate(layout.groups[operation.group].parts, start=own.start):
                    for met in set(part_of[list(part)].tolist()) - {-1}:
                        found[self.places[before].start + met].append(meeting)
        return found

    def meets(self, later: Wires, ends: Times, starts: Times) -> bool:
        """Whether a meeting of ``later`` starts before one of these has ended that has a port in common with it."""
        return bool((ends.max(axis=0) > starts.min(axis=0)).any()) and any(
            not ports.isdisjoint(others) and bool((ends[own].max(axis=0) > starts[theirs].min(axis=0)).any())
            for ports, own in self._of_kind
            for others, theirs in later._of_kind
        )

    def carry(self, ready: Times) -> tuple[Times, Times]:
        """Starts and ends of all meetings, which set out on idle links, each when the ranks of its part have joined at ``ready``.

        Shapes ``(num_meetings, num_blocks)``. Blocks in which all are ready alike go alike.
        """
        first = ready.min(axis=0)
        alike, block = np.unique((ready - first).T, axis=0, return_inverse=True)
        starts, ends = (np.asarray(times).T for times in zip(*map(self._meetings.carry, alike.tolist()), strict=True))
        return starts[:, block.ravel()] + first, ends[:, block.ravel()] + first
