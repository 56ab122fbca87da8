"""Clock: SimPy's environment in integer nanoseconds."""

from fractions import Fraction

import simpy

LATEST_NS = 2**60
"""The last moment of a run. Engines add, compare and subtract a few times in 64 bits, so they leave three bits free."""


class Clock(simpy.Environment):
    """A simulated clock that starts at 0 and never leaves the integers."""

    @property
    def now(self) -> int:
        """The simulated time in nanoseconds."""
        now = self._now
        assert isinstance(now, int), f"a duration of {now!r} was not rounded"
        return now

    def until(self, time_ns: int) -> simpy.Timeout:
        """An event at ``time_ns``. Raises ``ValueError`` for a time that has passed."""
        return self.timeout(time_ns - self.now)


def half_up(duration_ns: Fraction) -> int:
    """Round to whole nanoseconds, halves up, so that adding whole nanoseconds commutes with rounding."""
    return (2 * duration_ns.numerator + duration_ns.denominator) // (2 * duration_ns.denominator)
