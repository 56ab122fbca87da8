"""Clock: SimPy's environment in integer nanoseconds."""

from fractions import Fraction

import simpy
from simpy.events import EventPriority

LATEST_NS = 2**60
"""Latest time in ns that a run may reach. Engines add, compare and subtract a few times in 64 bits, so they
leave three bits free."""


class Clock(simpy.Environment):
    """A simulated clock that starts at 0 and never leaves the integers."""

    @property
    def now(self) -> int:
        """The simulated time in nanoseconds."""
        now = self._now
        assert isinstance(now, int), f"a duration of {now!r} was not rounded"
        return now

    def until(self, time_ns: int) -> simpy.Timeout:
        """Return an event at ``time_ns``. Raises ``ValueError`` for a time in the past."""
        return self.timeout(time_ns - self.now)

    def at_last(self) -> simpy.Event:
        """Return an event at the current time that comes after all others of this time."""
        event = simpy.Event(self)
        event._ok, event._value = True, None  # noqa: SLF001  # as ``succeed``, which schedules it among the others
        self.schedule(event, priority=_LAST)
        return event


_LAST = EventPriority(2)
"""Priority after SimPy's urgent and normal events."""


def half_up(duration_ns: Fraction) -> int:
    """Round to whole nanoseconds, halves up, so that adding whole nanoseconds commutes with rounding."""
    return (2 * duration_ns.numerator + duration_ns.denominator) // (2 * duration_ns.denominator)
