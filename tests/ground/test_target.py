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


def test_the_median_is_that_of_all_runs() -> None:
    """As numpy's, where a run that has not arrived arrives after all others."""
    generator = np.random.default_rng(3)
    for _ in range(200):
        count = int(generator.integers(1, 9))
        times = np.where(generator.uniform(size=count) < 0.7, generator.uniform(1, 9, count), np.inf)
        median = float(np.quantile(times, 0.5, method="inverted_cdf"))
        assert median_arrival([None if time == np.inf else time for time in times]) == (None if median == np.inf else median)
    assert median_arrival([2.0, None, None, 4.0]) == 4.0
    assert median_arrival([None, 1.0, None]) is None
    assert median_arrival([]) is None
