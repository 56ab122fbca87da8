"""Drawn: the spans of a timeline, from arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fleetbench.timeline import COMMUNICATION, Span
from sim.spans import collective_name
from sim.vector.groups import Group, Groups, Times
from sim.vector.lanes import Seen


class Drawn:
    """Keeps every rank's spans, those of its own that take time and all collectives'; see ``sim.reference``."""

    def __init__(self, groups: Groups, num_ranks: int) -> None:
        self._groups = groups
        self._num_ranks = num_ranks
        self._kept: list[tuple[str, str, Times, Times, Group | None]] = []
        self._several = False

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """See ``sim.vector.engine.Sight``."""
        count = len(steps)
        for stream, name, start, end, group in seen.spans:
            self._keep(stream, name, start[:count] + begins, end[:count] + begins, group)
        for flight in seen.flights:
            operation = flight.operation
            self._several = self._several or operation.communicator > 0
            group = self._groups[operation.group]
            start, end = (group.to_ranks(times[:count] + begins) for times in (flight.start, flight.end))
            self._keep(f"{COMMUNICATION} {operation.communicator}", collective_name(operation), start, end, group)

    def spans(self) -> Iterator[Span]:
        """All of them, rank by rank within each kind."""
        for stream, name, start, end, group in self._kept:
            is_collective = stream.startswith(COMMUNICATION)
            shape = (max(len(start), len(end)), self._num_ranks)
            taken = np.broadcast_to(end - start, shape)
            begun = np.broadcast_to(start, shape)
            drawn = np.broadcast_to(group.members, shape) if is_collective and group is not None else taken > 0
            shown = stream if self._several or not is_collective else COMMUNICATION
            for block, rank in zip(*np.nonzero(drawn), strict=True):
                yield Span(int(rank), shown, name, int(begun[block, rank]), int(taken[block, rank]))

    def _keep(self, stream: str, name: str, start: Times, end: Times, group: Group | None) -> None:
        self._kept.append((stream, name, start, end, group))
