"""How a block of timed steps becomes one number."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

UNIT_STEPS = 4
"""Steps that are timed together: one Local SGD round, one merged update. No unit misses an averaging."""


def median_step_s(step_us: Sequence[Sequence[int]]) -> float:
    """Seconds a step of the median unit, averaged over the ranks; ``step_us``: each rank's steps in microseconds."""
    return mean(median(_units(rank)) for rank in step_us) / UNIT_STEPS / 1e6


def mean_step_s(step_us: Sequence[Sequence[int]]) -> float:
    """Seconds a step of the whole block, slow units included, averaged over the ranks."""
    return mean(mean(rank) for rank in step_us) / 1e6


def _units(rank_us: Sequence[int]) -> list[int]:
    return [sum(rank_us[start : start + UNIT_STEPS]) for start in range(0, len(rank_us), UNIT_STEPS)]
