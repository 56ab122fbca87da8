"""Shared links: carries collectives that share ports while in flight together; see ``event_loop``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from fleetbench.plan.operations import Operation
from sim.arrays.event_loop import Meetings
from sim.arrays.layout import Layout, Times, alone_ns
from sim.arrays.supported import SHARED, Unsupported
from sim.arrays.transfers import Flight, Transfers


class SharedTransfers(Transfers):
    """Carries all collectives that were joined when a rank waits for one of them."""

    def __init__(self, layout: Layout, num_blocks: int, wires: Callable[[tuple[Operation, ...]], Wires]) -> None:
        """``wires`` is a cached version of this module's ``Wires``."""
        super().__init__(layout, num_blocks)
        self._wires = wires
        self._waiting: list[tuple[Operation, Times]] = []
        self._carried: list[tuple[Wires, Times]] = []
        """Meetings carried earlier, and the latest end in each block. Meetings carried later may start before it."""

    def begin(self, start: Times, num_ids: int) -> None:
        """See ``Transfers``."""
        self._carry()  # collectives of this step do not share ports with those still in flight: ``shares`` checks it
        earliest = start.min(axis=1)
        self._carried = [before for before in self._carried if (before[-1] > earliest).any()]
        super().begin(start, num_ids)

    def join(self, operation: Operation, ready: Times) -> None:
        """See ``Transfers``."""
        self._meet(operation, ready)
        self._waiting.append((operation, ready))

    def flights(self, after: tuple[int, ...] | None) -> list[Flight]:
        """See ``Transfers``."""
        if after is None or any(operation.id in after for operation, _ in self._waiting):
            self._carry()
        return super().flights(after)

    def finished(self) -> Times:
        """See ``Transfers``."""
        self._carry()
        return super().finished()

    def _carry(self) -> None:
        """Carry the collectives that were joined since the last time."""
        chosen, self._waiting = self._waiting, []
        if not chosen:
            return
        operations = tuple([operation for operation, _ in chosen])
        shapes = [(self._num_blocks, len(self._layout.groups[operation.group].parts)) for operation in operations]
        times = [np.broadcast_to(self._queued(*one), shape) for one, shape in zip(chosen, shapes, strict=True)]
        ready, wires = np.concatenate(times, axis=1), self._wires(operations)
        starts, ends = wires.carry(ready.T)
        first, last = starts.min(axis=0), ends.max(axis=0)
        if any((latest > first).any() and before.shares(wires) for before, latest in self._carried):
            raise Unsupported(SHARED)
        self._carried.append((wires, last))
        for operation, own in zip(operations, wires.places, strict=True):
            flight = self._step[operation.id] = Flight(operation, starts[own].T, ends[own].T, self._met[operation.id][1])
            key = operation.communicator, operation.group
            self._queues[key] = flight.start, [np.maximum.reduce([flight.end, *self._queues.get(key, (None, []))[1]])]

    def _queued(self, operation: Operation, ready: Times) -> Times:
        """Return when a collective may start, as far as is known.

        If a communicator carries several at once, ``shares`` decides later.
        """
        _, ends = self._queues.get((operation.communicator, operation.group), (None, []))
        ready = self._after(operation, ready)
        return np.maximum(ready, ends[0]) if ends and self._layout.queue_depth == 1 else ready


class Wires:
    """The meetings of operations that are carried together, and the event loop that carries them.

    Raises ``Unsupported`` for a meeting that takes 0 ns, because the order of starts within a nanosecond
    would then matter.
    """

    def __init__(self, layout: Layout, operations: Sequence[Operation]) -> None:
        parts = [layout.groups[operation.group].parts for operation in operations]
        ends = list(accumulate(map(len, parts)))
        self.places = [slice(end - len(own), end) for end, own in zip(ends, parts, strict=True)]
        """Numbers of each operation's meetings, one slice per operation."""
        routes = [route for operation in operations for route in layout.ways(operation)]
        if not all(map(alone_ns, routes)):
            raise Unsupported(SHARED)
        queues: dict[tuple[int, str, int], list[int]] = {}
        for operation, place in zip(operations, self.places, strict=True):
            for part, meeting in enumerate(range(place.start, place.stop)):
                queues.setdefault((operation.communicator, operation.group, part), []).append(meeting)
        followers = self._followers(layout, operations, len(routes))
        self._meetings = Meetings(routes, list(queues.values()), layout.routes.links, layout.queue_depth, followers)
        self._ports = {port for route in routes for port in route.ports}

    def _followers(self, layout: Layout, operations: Sequence[Operation], num: int) -> list[list[int]]:
        """Return the meetings that come after each: of later operations, in parts that share a rank with its part."""
        place = {operation.id: index for index, operation in enumerate(operations)}
        found: list[list[int]] = [[] for _ in range(num)]
        for operation, own in zip(operations, self.places, strict=True):
            for before in (place[other] for other in operation.after if other in place):
                part_of = layout.groups[operations[before].group].part_of
                for meeting, part in enumerate(layout.groups[operation.group].parts, start=own.start):
                    for met in set(part_of[list(part)].tolist()) - {-1}:
                        found[self.places[before].start + met].append(meeting)
        return found

    def shares(self, later: Wires) -> bool:
        """Whether a meeting of ``later`` passes a port of one of these."""
        return not self._ports.isdisjoint(later._ports)

    def carry(self, ready: Times) -> tuple[Times, Times]:
        """Return the starts and ends of all meetings on idle links, shapes ``(num_meetings, num_blocks)``.

        ``ready``, of the same shape, has the times at which the ranks of each meeting have joined. Blocks
        whose times differ only by a constant are carried once.
        """
        first = ready.min(axis=0)
        if ready.shape[1] == 1:
            starts, ends = (np.asarray(times)[:, None] for times in self._meetings.carry((ready[:, 0] - first).tolist()))
            return starts + first, ends + first
        alike, block = np.unique((ready - first).T, axis=0, return_inverse=True)
        starts, ends = (np.asarray(times).T for times in zip(*map(self._meetings.carry, alike.tolist()), strict=True))
        return starts[:, block.ravel()] + first, ends[:, block.ravel()] + first
