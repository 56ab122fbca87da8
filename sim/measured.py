"""Measured: an all-reduce that takes what a profile's points say."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction

from fleetbench.measurements import CollectivePoint
from sim.algorithms import Ranks, ring
from sim.links import Links
from sim.work import Cost, Route


class MeasuredAllReduce:
    """Times between two points lie on the line between them.

    Beyond the largest they lie on the line from the largest that is at most half of it, because neighbours may lie
    so close that their noise is all that line would show; before the smallest they are its own.
    """

    def __init__(self, points: Sequence[CollectivePoint], ranks: Ranks, links: Links) -> None:
        """``points`` has two sizes at least."""
        self._points = sorted({point.nbytes: point.took for point in points}.items())
        self._half = max(bisect_right(self._points, self._points[-1][0] // 2, key=lambda point: point[0]) - 1, 0)
        self._ring = ring("all_reduce", ranks, links)
        self._latency_ns = max(pace.latency_ns for pace in self._ring.paces)

    def route(self, nbytes: int) -> Route:
        """What an all-reduce of ``nbytes`` takes; of it, what a ring's messages take before any byte is latency."""
        took_ns = self.took_ns(nbytes)
        latency_ns = min(self._latency_ns, int(took_ns))
        return self._ring.routed(Cost(latency_ns, took_ns - latency_ns), nbytes)

    def took_ns(self, nbytes: int) -> Fraction:
        """The time of ``nbytes``."""
        if nbytes <= self._points[0][0]:
            return Fraction(self._points[0][1])
        above = bisect_left(self._points, nbytes, key=lambda point: point[0])
        first, second = (above - 1, above) if above < len(self._points) else (self._half, -1)
        (small, fast_ns), (large, slow_ns) = self._points[first], self._points[second]
        return max(fast_ns + Fraction(slow_ns - fast_ns, large - small) * (nbytes - small), Fraction(0))
