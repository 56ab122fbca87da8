"""Collectives: where trainers meet."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from simpy import Event

from fleetbench.plan.operations import Operation
from sim.clock import Clock
from sim.network import Network


@dataclass(slots=True)
class Meeting:
    """One collective of some ranks: who is still missing before it starts, its start and its end."""

    operation: Operation
    absent: int
    start: Event
    """The network takes it up."""
    end: Event
    waits: dict[Event, None] = field(default_factory=dict)
    """What its ranks still have in flight that comes before it."""


@dataclass(frozen=True, slots=True)
class Carried:
    """One collective that was carried out."""

    operation: Operation
    ranks: tuple[int, ...]
    start_ns: int
    end_ns: int


class Collectives:
    """The collectives of a run.

    A collective is known by its operation's id, the same on every rank, and the part of the group
    that meets; the parts of a group meet apart from each other. It waits for every rank of the part
    to ``join`` and for what each of them has in flight before it, is then carried by the network,
    and its end triggers one event for all ranks.
    """

    def __init__(self, clock: Clock, network: Network) -> None:
        self.carried: list[Carried] = []
        self._clock = clock
        self._network = network
        self._meetings: dict[tuple[int, int], Meeting] = {}

    def join(self, operation: Operation, part: tuple[int, ...], after: Sequence[Event]) -> Meeting:
        """One rank of ``part`` arrives at ``operation``, which starts once the events ``after`` have ended."""
        key = (operation.id, part[0])
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(operation, len(part), self._clock.event(), self._clock.event())
        assert meeting.operation == operation, f"ranks disagree about operation {operation.id}: {meeting.operation} and {operation}"
        meeting.waits.update(dict.fromkeys(after))
        meeting.absent -= 1
        if meeting.absent == 0:
            del self._meetings[key]
            self._clock.process(self._carry(meeting, part))
        return meeting

    def _carry(self, meeting: Meeting, part: tuple[int, ...]) -> Generator[Event, object, None]:
        if meeting.waits:
            yield self._clock.all_of(meeting.waits)
        start_ns = self._clock.now
        meeting.start.succeed()
        yield from self._network.carry(meeting.operation, part)
        self.carried.append(Carried(meeting.operation, part, start_ns, self._clock.now))
        meeting.end.succeed()
