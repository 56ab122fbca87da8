"""Collectives: where trainers meet."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from simpy import Event

from fleetbench.plan.operations import Operation
from sim.clock import Clock
from sim.network import Network


@dataclass(slots=True)
class Meeting:
    """One collective before it starts: who is still missing, and the event that ends it."""

    operation: Operation
    absent: int
    end: Event


@dataclass(frozen=True, slots=True)
class Carried:
    """One collective that was carried out."""

    operation: Operation
    ranks: tuple[int, ...]
    start_ns: int
    end_ns: int


class Collectives:
    """The collectives of a run.

    A collective is known by its operation's id, the same on every rank. It waits for every rank of
    its group to ``join`` and for the collectives that it comes after, is then carried by the
    network, and its end triggers one event for all ranks.
    """

    def __init__(self, clock: Clock, network: Network, groups: Mapping[str, tuple[int, ...]]) -> None:
        self.carried: list[Carried] = []
        self._clock = clock
        self._network = network
        self._groups = groups
        self._meetings: dict[int, Meeting] = {}

    def join(self, operation: Operation, after: Sequence[Event]) -> Event:
        """One rank arrives at ``operation``, which starts once the events ``after`` have ended; returns its end."""
        meeting = self._meetings.get(operation.id)
        if meeting is None:
            meeting = self._meetings[operation.id] = Meeting(operation, len(self._groups[operation.group]), self._clock.event())
        assert meeting.operation == operation, f"ranks disagree about operation {operation.id}: {meeting.operation} and {operation}"
        meeting.absent -= 1
        if meeting.absent == 0:
            del self._meetings[operation.id]
            self._clock.process(self._carry(meeting, after))
        return meeting.end

    def _carry(self, meeting: Meeting, after: Sequence[Event]) -> Generator[Event, object, None]:
        operation = meeting.operation
        assert operation.kind == "all_reduce", f"no algorithm for {operation.kind}"
        if after:
            yield self._clock.all_of(after)
        start_ns = self._clock.now
        ranks = self._groups[operation.group]
        yield from self._network.all_reduce(ranks, operation.nbytes)
        self.carried.append(Carried(operation, ranks, start_ns, self._clock.now))
        meeting.end.succeed()
