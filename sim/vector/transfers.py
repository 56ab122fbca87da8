"""Transfers: collectives that never share a port, each behind what it waits for.

One starts when all ranks of its part have joined, when what they have in flight before it has ended,
and when its communicator has started those before it and carries fewer than it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fleetbench.plan.operations import Operation
from sim.vector.groups import Times
from sim.vector.layout import Layout


@dataclass(frozen=True, slots=True)
class Flight:
    """One collective of every part of a group: when it starts and ends there."""

    operation: Operation
    start: Times
    end: Times


class Carrier(Protocol):
    """Carries collectives that all ranks of a part have joined; the operations of a step go by their ids."""

    def begin(self, start: Times) -> None:
        """A step begins; ranks start it at ``start``."""
        ...

    def join(self, operation: Operation, ready: Times) -> None:
        """The last rank of each part joins at ``ready``."""
        ...

    def flights(self, after: tuple[int, ...] | None) -> list[Flight]:
        """Those of ``after`` that were joined in this step; none named: of all steps, as far as they may still be in flight."""
        ...

    def finished(self) -> Times:
        """When nothing is in flight any more, in each block; shape ``(num_blocks, 1)``."""
        ...

    def block(self, index: int, begin_ns: int) -> Carrier:
        """One block for itself, its times shifted by ``begin_ns``."""
        ...


class Transfers:
    """See the module."""

    def __init__(self, layout: Layout, num_blocks: int) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        self._step: dict[int, Flight] = {}
        self._before: list[Flight] = []
        self._queues: dict[tuple[int, str], tuple[Times, list[Times]]] = {}
        """By communicator and group: the last start, and the latest ends, ascending, as many as may be in flight."""

    def begin(self, start: Times) -> None:
        """See ``Carrier``."""
        earliest = start.min(axis=1, keepdims=True)
        self._before = [flight for flight in (*self._before, *self._step.values()) if (flight.end > earliest).any()]
        self._step = {}

    def join(self, operation: Operation, ready: Times) -> None:
        """See ``Carrier``."""
        for other in operation.after:
            if other in self._step:
                ready = np.maximum(ready, self._as_seen(self._step[other], operation.group))
        depth, key = self._layout.queue_depth, (operation.communicator, operation.group)
        started, ends = self._queues.get(key, (None, []))
        start = ready if started is None else np.maximum(ready, started)
        if len(ends) == depth:
            start = np.maximum(start, ends[0])
            ends = ends[1:]
        end = start + self._layout.takes_ns(operation)
        ends = [*ends, end] if depth == 1 else list(np.sort(np.stack([*ends, end]), axis=0))
        self._queues[key] = (start, ends)
        self._step[operation.id] = Flight(operation, start, end)

    def flights(self, after: tuple[int, ...] | None) -> list[Flight]:
        """See ``Carrier``."""
        if after is None:
            return [*self._before, *self._step.values()]
        return [self._step[other] for other in after if other in self._step]

    def finished(self) -> Times:
        """See ``Carrier``."""
        ends = [ends[-1].max(axis=1, keepdims=True) for _, ends in self._queues.values()]
        return np.maximum.reduce(ends) if ends else np.zeros((self._num_blocks, 1), dtype=np.int64)

    def block(self, index: int, begin_ns: int) -> Transfers:
        """See ``Carrier``."""

        def own(times: Times) -> Times:
            return times[index : index + 1] + begin_ns

        taken = Transfers(self._layout, 1)
        taken._step = {key: Flight(flight.operation, own(flight.start), own(flight.end)) for key, flight in self._step.items()}
        taken._before = [Flight(flight.operation, own(flight.start), own(flight.end)) for flight in self._before]
        taken._queues = {key: (own(start), [own(end) for end in ends]) for key, (start, ends) in self._queues.items()}
        return taken

    def _as_seen(self, flight: Flight, group: str) -> Times:
        """A collective's end, in each part of another group."""
        of = flight.operation.group
        return flight.end if of == group else self._layout.groups.crossing(of, group).latest(flight.end)
