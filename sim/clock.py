"""Clock: SimPy's environment in integer nanoseconds."""

from fractions import Fraction

import simpy
from simpy.events import EventPriority

LATEST_NS = 2**60
"""Latest time in ns that a run may reach. It leaves three of 64 bits free, because engines add, compare and
subtract times."""


class Clock(simpy.Environment):
    """A simulated clock that starts at 0 and has only integer times."""

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
        event._ok, event._value = True, None  # noqa: SLF001  # as ``succeed`` does, which would schedule it among the others
        self.schedule(event, priority=_LAST)
        return event


_LAST = EventPriority(2)
"""Priority after SimPy's urgent and normal events."""


def half_up(duration_ns: Fraction) -> int:
    """Return the duration rounded to whole nanoseconds, halves up.

    Adding whole nanoseconds commutes with this rounding.
    """
    return (2 * duration_ns.numerator + duration_ns.denominator) // (2 * duration_ns.denominator)
