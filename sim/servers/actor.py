"""Actor: a role on the simulated clock, which does one thing after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fleetbench.plan.events import Event, Message
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import RoleDecider
from fleetbench.timeline import Span
from sim.clock import Clock
from sim.servers.costs import Costs

Watch = Callable[[str, int, Operation], None]
"""Told of a role, its rank, and an operation that has ended."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What comes with a message."""

    nbytes: int = 0
    versions: tuple[int, ...] = ()
    """Of a push: for each of its gradients, how often the server had updated what it was computed from."""


NOTHING = Carried()
Post = Callable[[str, int, int, Message, Carried], None]
"""Carries a message between a trainer or sender and a server: the former's role and rank, the latter's number, message, its content."""


class Actor:
    """Hears events in the order in which they come, and does what is decided.

    Idle, until ``hear``; then busy: while an operation takes its time, what comes in waits. An event
    is decided on when the work on all before it has ended.
    """

    def __init__(self, clock: Clock, decider: RoleDecider, costs: Costs, watch: Watch | None) -> None:
        self.decider = decider
        self.spans: list[Span] = []
        self._clock = clock
        self._costs = costs
        self._watch = watch
        self._inbox: deque[tuple[Event, Carried, int]] = deque()
        self._to_do: deque[Operation] = deque()
        self._busy = False
        self._took_ns = 0
        """By the operation that has just ended."""

    def hear(self, event: Event, carried: Carried = NOTHING) -> None:
        """An event, with what comes with it."""
        self._inbox.append((event, carried, self._clock.now))
        self._count(1)
        if not self._busy:
            self._busy = True
            self._work()

    def _work(self) -> None:
        while True:
            while self._to_do:
                operation = self._to_do[0]
                self._took_ns = self._costs.took_ns(self.decider.role, self.decider.rank, operation, self._nbytes(operation))
                if self._took_ns:
                    self._clock.timeout(self._took_ns).callbacks.append(lambda _: self._go_on())
                    return
                self._end(self._to_do.popleft())
            if not self._inbox:
                self._busy = False
                self._idle()
                return
            event, carried, since_ns = self._inbox.popleft()
            self._begin(event, carried, since_ns)
            self._to_do.extend(self.decider.on(self._clock.now, event))

    def _go_on(self) -> None:
        self._end(self._to_do.popleft())
        self._work()

    def _end(self, operation: Operation) -> None:
        self._do(operation)
        if self._watch is not None:
            self._watch(self.decider.role, self.decider.rank, operation)

    def _begin(self, event: Event, carried: Carried, since_ns: int) -> None:
        """An event that has waited since ``since_ns`` is decided on next."""

    def _count(self, more: int) -> None:
        """So many more events wait or are worked on."""

    def _idle(self) -> None:
        """There is nothing left to do."""

    def _nbytes(self, operation: Operation) -> int:
        """Of what an operation is about."""
        raise NotImplementedError

    def _do(self, operation: Operation) -> None:
        """What the end of an operation brings about."""
        raise NotImplementedError
