"""Silence: for how long each of several processes has not been heard. Time in which this process itself is stopped does not count."""

import time
from collections.abc import Iterable


class Silence:
    """Life cycle: made; ``hear`` for each message; ``pass_time`` often; ``late`` has those that are silent for too long.

    ``limit_s``: how long one that has been heard may be silent; ``startup_limit_s``: one that has not been heard yet.
    """

    def __init__(self, numbers: Iterable[int], limit_s: float, startup_limit_s: float) -> None:
        self.silent_s = dict.fromkeys(numbers, limit_s - startup_limit_s)
        self._limit_s, self._at = limit_s, time.monotonic()

    def hear(self, number: int) -> None:
        """A message of it has come."""
        self.silent_s[number] = 0.0

    def pass_time(self) -> float:
        """Count the seconds since the last call, and return them; 0 where they are so many that this process did not run."""
        now = time.monotonic()
        passed_s, self._at = now - self._at, now
        if passed_s > max(self._limit_s / 2, 1.0):
            return 0.0
        for number in self.silent_s:
            self.silent_s[number] += passed_s
        return passed_s

    @property
    def late(self) -> list[int]:
        """Those that are silent for too long."""
        return [number for number, silent_s in self.silent_s.items() if silent_s > self._limit_s]
