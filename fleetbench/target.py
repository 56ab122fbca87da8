"""Target: when a training has reached its loss, and what several runs say of it of which some never do."""

from collections.abc import Sequence
from typing import NamedTuple

HITS_IN_A_ROW = 3
"""So many evaluations at or below the target count as reached, at the first of them."""


class Crossing(NamedTuple):
    """Where a training reaches its target."""

    step: int
    """Of the first of ``HITS_IN_A_ROW`` evaluations in a row at or below the target."""
    smooth: float
    """Where the line from the evaluation before it crosses the target: not only multiples of ``workload.eval_every``."""


def crossing(evaluated: Sequence[tuple[int, float]], target: float | None) -> Crossing | None:
    """The target's crossing by successive ``(step, loss)``; none where it is not confirmed, or there is no target."""
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
    """The time by which half of the runs have arrived; none where too few have. None: a run that has not, by the end that all share."""
    half = (len(times) + 1) // 2
    return next(iter(sorted(time for time in times if time is not None)[max(half - 1, 0) : half]), None)
