"""Collectives: where trainers meet."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from simpy import Event

from fleetbench.plan.operations import Operation
from sim.clock import Clock
from sim.execution import Carried
from sim.reference.network import Network


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


@dataclass(slots=True)
class _Queue:
    """What of one communicator is under way among some ranks, and what joined last."""

    last: Meeting | None = None
    flying: dict[Event, None] = field(default_factory=dict)
    """The ends of what has started and not ended."""


class Collectives:
    """The collectives of a run.

    A collective is known by its operation's id, the same on every rank, and the part of the group
    that meets; the parts of a group meet apart from each other. It waits for every rank of the part
    to ``join`` and for what each of them has in flight before it. A part's operations on one
    communicator start in the order in which its ranks join them, and no more than ``queue_depth``
    are under way. The network carries it, and its end triggers one event for all ranks.
    """

    def __init__(self, clock: Clock, network: Network, queue_depth: int = 1, tell: Callable[[Carried], None] | None = None) -> None:
        """``tell`` is told of every collective as it ends."""
        self._tell = tell
        self._clock = clock
        self._network = network
        self._queue_depth = queue_depth
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._queues: dict[tuple[int, tuple[int, ...]], _Queue] = {}

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
            queue = self._queues.setdefault((operation.communicator, part), _Queue())
            if queue.last is not None and not queue.last.start.triggered:
                meeting.waits[queue.last.start] = None
            queue.last = meeting
            self._clock.process(self._carry(meeting, part, queue))
        return meeting

    def _carry(self, meeting: Meeting, part: tuple[int, ...], queue: _Queue) -> Generator[Event, object, None]:
        if meeting.waits:
            yield self._clock.all_of(meeting.waits)
        if len(queue.flying) >= self._queue_depth:  # the next one waits for this one's start, so one end lets one start
            yield self._clock.any_of(queue.flying)
        start_ns = self._clock.now
        queue.flying[meeting.end] = None
        meeting.start.succeed()
        yield from self._network.carry(meeting.operation, part)
        if self._tell is not None:
            self._tell(Carried(meeting.operation, part, start_ns, self._clock.now))
        del queue.flying[meeting.end]
        meeting.end.succeed()
