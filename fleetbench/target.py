"""Target: when a run reaches its target loss, and the median time over runs, some of which never reach it."""

from collections.abc import Sequence
from typing import NamedTuple

HITS_IN_A_ROW = 3
"""Number of successive evaluations at or below the target that count as reaching it, at the first of them."""


class Crossing(NamedTuple):
    """Point at which a training run reaches its target."""

    step: int
    """Step of the first of ``HITS_IN_A_ROW`` successive evaluations at or below the target."""
    smooth: float
    """Step, interpolated from the evaluation before it, at which the loss crosses the target. Unlike
    ``step``, it need not be a multiple of ``workload.eval_every``."""


def crossing(evaluated: Sequence[tuple[int, float]], target: float | None) -> Crossing | None:
    """Return the point at which successive evaluations ``(step, loss)`` reach the target.

    None without a target, or if fewer than ``HITS_IN_A_ROW`` evaluations in a row reach it.
    """
    if target is None:
        return None
    hits = [loss <= target for _, loss in evaluated]
    place = next((first for first in range(len(hits) - HITS_IN_A_ROW + 1) if all(hits[first : first + HITS_IN_A_ROW])), None)
    if place is None:
        return None
    step, loss = evaluated[place]
    before, higher = evaluated[place - 1] if place else (step, loss)
    share = (higher - target) / (higher - loss) if target < higher < float("inf") else 1.0
    return Crossing(step, before + share * (step - before))


def median_arrival(times: Sequence[float | None]) -> float | None:
    """Return the time by which half of the runs have reached the target; None if fewer have.

    In ``times``, None is a run that did not reach it. All runs have the same length.
    """
    half = (len(times) + 1) // 2
    return next(iter(sorted(time for time in times if time is not None)[max(half - 1, 0) : half]), None)
