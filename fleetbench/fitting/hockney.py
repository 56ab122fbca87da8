"""Hockney: the latency and the bandwidth of a ring all-reduce, from what all-reduces of several sizes took.

Hockney 1994, "The communication challenge for MPP", equation 1, for a ring among P ranks:
``T(S) = 2 (P - 1) latency + 2 ((P - 1) / P) S / bandwidth``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetbench.cluster import Link
from fleetbench.fitting.lines import Line, fit_line
from fleetbench.quantities import LARGEST, BitsPerSecond, Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Hockney:
    """``T(S) = alpha + S beta``, in seconds and bytes."""

    trainers: int
    line: Line

    @property
    def link(self) -> Link:
        """The link that a ring among so many trainers would need to take as long."""
        steps = 2 * (self.trainers - 1)
        slope = self.line.slope
        bandwidth = steps / self.trainers * 8 / slope if slope > 0 else LARGEST
        return Link(
            latency=Nanoseconds(round(self.line.intercept * 1e9 / steps)), bandwidth=BitsPerSecond(max(1, min(LARGEST, round(bandwidth))))
        )

    def took_s(self, nbytes: float) -> float:
        """Seconds of an all-reduce of ``nbytes``."""
        return self.line.at(nbytes)


def fit_hockney(nbytes: Sequence[float], took_s: Sequence[float], trainers: int, weights: Sequence[float] | None = None) -> Hockney:
    """Fit what all-reduces of ``nbytes`` took among ``trainers`` (at least 2)."""
    return Hockney(trainers=trainers, line=fit_line(nbytes, took_s, weights))
