"""When a training has reached its target, and the median of runs of which some never do."""

import numpy as np
import pytest

from fleetbench.target import crossing, median_arrival


@pytest.mark.parametrize(("hits", "index"), [("0111", 1), ("1101", None), ("110111", 3), ("11", None), ("", None), ("111", 0)])
def test_three_hits_in_a_row_count_from_the_first(hits: str, index: int | None) -> None:
    """Two hits and a miss are none."""
    found = crossing([(10 * place, 0.5 if hit == "1" else 1.0) for place, hit in enumerate(hits, 1)], 0.5)
    assert (None if found is None else found.step) == (None if index is None else 10 * (index + 1))


def test_the_crossing_lies_on_the_line_between_two_evaluations() -> None:
    """From 1.0 at step 10 to 0.4 at step 20, a target of 0.7 is crossed half way; the first evaluation has no line to it."""
    losses = [(10, 1.0), (20, 0.4), (30, 0.3), (40, 0.2)]
    assert crossing(losses, 0.7) == (20, 15.0)
    assert crossing(losses, 0.4) == (20, 20.0)
    assert crossing(losses, 1.0) == (10, 10.0)
    assert crossing([(10, float("inf")), *losses[1:]], 0.7) == (20, 20.0)
    assert crossing(losses, None) is None


def test_the_median_is_kaplan_and_meiers() -> None:
    """Against the sum of Efron's redistribution to the right: a run that is over hands its weight to those that are not yet."""
    generator = np.random.default_rng(3)
    for _ in range(200):
        count = int(generator.integers(1, 9))
        ends, wanted = generator.uniform(1, 9, count).tolist(), generator.uniform(1, 9, count).tolist()
        times = [time if time <= end else None for time, end in zip(wanted, ends, strict=True)]
        assert median_arrival(times, ends) == _redistributed(times, ends)
    assert median_arrival([2.0, None, None, 4.0], [9.0] * 4) == 4.0
    assert median_arrival([None, 1.0, None], [9.0] * 3) is None


def _redistributed(times: list[float | None], ends: list[float]) -> float | None:
    runs = sorted(zip([end if time is None else time for time, end in zip(times, ends, strict=True)], times, strict=True))
    weights = [1.0 / len(runs)] * len(runs)
    arrived = 0.0
    for place, (at, time) in enumerate(runs):
        later = len(runs) - place - 1
        if time is not None:
            arrived += weights[place]
            if arrived >= 0.5 - 1e-9:
                return at
        elif later:
            weights[place + 1 :] = [weight + weights[place] / later for weight in weights[place + 1 :]]
    return None
