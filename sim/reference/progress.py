"""Progress: how far a rank's compute has come, where collectives in flight slow it."""

from __future__ import annotations

from collections.abc import Generator
from fractions import Fraction

from simpy import Event

from sim.clock import Clock, half_up


class Progress:
    """The compute of one step, in nanoseconds that it takes undisturbed.

    A step starts at 0 with ``begin`` and proceeds only while ``reach`` is under way: what happens
    between two calls holds compute up. While collectives of the rank are in flight, compute takes 1 +
    ``contention`` times as long. What was done is integrated exactly, and the time of each mark that
    is reached is rounded once.
    """

    def __init__(self, clock: Clock, contention: float) -> None:
        self._clock = clock
        self._slow = 1 + Fraction(repr(contention))  # the decimal that a file writes, not the double next to it
        self._in_flight = 0
        self._done_ns: Fraction | int = 0
        self._since_ns: int | None = None
        self._changed: Event | None = None
        self._before: tuple[int, Fraction] | None = None
        """When the pace last changed, and what it had been until then."""

    def begin(self) -> None:
        """Nothing of the step has been computed."""
        self._done_ns = 0

    def slows_during(self, start: Event, end: Event) -> None:
        """A collective of this rank is in flight between two events."""
        if self._slow == 1:
            return
        start.callbacks.append(lambda _: self._change(1))
        end.callbacks.append(lambda _: self._change(-1))

    def reach(self, mark_ns: int) -> Generator[Event, object, None]:
        """Compute up to a mark."""
        if self._slow == 1:  # nothing disturbs, so the next mark is a known time
            if self._done_ns < mark_ns:
                yield self._clock.timeout(mark_ns - int(self._done_ns))
                self._done_ns = mark_ns
            return
        while self._done_ns < mark_ns:
            self._since_ns = self._clock.now
            self._changed = self._clock.event()
            reached = self._clock.timeout(self._delay_ns(mark_ns - self._done_ns))
            yield reached | self._changed
            self._integrate()
            if reached.processed:
                break
        self._since_ns = self._changed = None

    @property
    def _pace(self) -> Fraction:
        return self._slow if self._in_flight else Fraction(1)

    def _delay_ns(self, left_ns: Fraction | int) -> int:
        """Until what is left is done. What the pace until now would round to now is done, in whatever order things happen now."""
        if self._before is not None and self._before[0] == self._clock.now and half_up(left_ns * self._before[1]) <= 0:
            return 0
        return max(half_up(left_ns * self._pace), 0)

    def _integrate(self) -> None:
        if self._since_ns is not None:
            self._done_ns += (self._clock.now - self._since_ns) / self._pace
            self._since_ns = self._clock.now

    def _change(self, collectives: int) -> None:
        self._integrate()
        if self._before is None or self._before[0] != self._clock.now:
            self._before = (self._clock.now, self._pace)
        self._in_flight += collectives
        if self._changed is not None and not self._changed.triggered:
            self._changed.succeed()
