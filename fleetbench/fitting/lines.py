"""Lines: ``y = intercept + slope x`` through measured times, both at least zero; and the link of such a line.

Hockney 1994, "The communication challenge for MPP", equation 1, for a ring all-reduce among P ranks: ``T(S) =
2 (P - 1) latency + 2 ((P - 1) / P) S / bandwidth``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from fleetbench.cluster import Link
from fleetbench.quantities import LARGEST, BitsPerSecond, Nanoseconds
from fleetbench.stragglers import Floats

_ROUNDS = 20
_HUBER = 1.345
"""Number of standard deviations beyond which residuals count less (Huber 1981: 95 % efficient for normal
noise)."""
_SMALLEST_SCALE = 1e-4
"""Relative residual below which a point is never an outlier, however well the rest fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A fitted line."""

    intercept: float
    """Time at x = 0."""
    slope: float
    """Time per unit of x."""
    largest_residual: float
    """Largest distance of a point from the line, as a share of the point."""
    statement: str | None = None
    """Sentence about what the points could not determine; ``None`` if they determined everything."""


def fit_line(x: Sequence[float], y: Sequence[float], weights: Sequence[float] | None = None) -> Line:
    """Return the line with the least weighted sum of squared *relative* residuals; outliers count less.

    ``y`` are durations: those of small and of large ``x`` have the same weight. Points that are not above
    zero in ``y`` are ignored. If all ``x`` are equal, the whole duration goes to the slope, and ``statement``
    says so.
    """
    at, took = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    weight = np.ones_like(took) if weights is None else np.asarray(weights, dtype=float)
    known = (took > 0) & np.isfinite(took) & (weight > 0)
    at, took, weight = at[known], took[known], weight[known]
    if len(took) == 0:
        return Line(intercept=0.0, slope=0.0, largest_residual=0.0, statement="nothing took any time")
    if np.ptp(at) == 0.0:
        return _of_one_size(float(at[0]), took)
    scale = float(np.abs(at).max())
    rows = np.column_stack([1.0 / took, at / scale / took])
    found, trust = np.zeros(2), np.ones_like(took)
    for _ in range(_ROUNDS):
        root = np.sqrt(weight * trust)
        found = nnls(rows * root[:, None], root)[0]
        residuals = np.abs(rows @ found - 1.0)
        spread = max(1.4826 * float(np.median(residuals)), _SMALLEST_SCALE)
        trust = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-300))
    return Line(intercept=float(found[0]), slope=float(found[1]) / scale, largest_residual=float(residuals.max()))


def _of_one_size(x: float, took: Floats) -> Line:
    """Return the line through points with the same ``x``, which do not determine intercept and slope separately."""
    middle = float(np.median(took))
    spread = float(np.abs(took / middle - 1.0).max())
    all_slope = x > 0
    return Line(
        intercept=0.0 if all_slope else middle,
        slope=middle / x if all_slope else 0.0,
        largest_residual=spread,
        statement="all points have one size, so what a point costs and what its size costs cannot be told apart",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hockney:
    """Hockney's model of an all-reduce: ``T(S) = alpha + beta S`` is the time in seconds for S bytes.

    ``alpha`` is in seconds, and ``beta`` in seconds per byte.
    """

    trainers: int
    """Number of ranks."""
    line: Line
    """Line through the measured times, in seconds and bytes."""

    @property
    def link(self) -> Link:
        """Link with which a ring all-reduce among these ranks would take as long."""
        steps = 2 * (self.trainers - 1)
        slope = self.line.slope
        bandwidth = steps / self.trainers * 8 / slope if slope > 0 else LARGEST
        return Link(
            latency=Nanoseconds(round(self.line.intercept * 1e9 / steps)), bandwidth=BitsPerSecond(max(1, min(LARGEST, round(bandwidth))))
        )
