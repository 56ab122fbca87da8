"""Staleness of pushes, against numpy's quantiles of the pushes written out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.staleness import staleness_of


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 40), max_size=12))
def test_counts_say_what_the_pushes_say(counts: dict[int, int]) -> None:
    """Mean, quantiles and maximum are those of the list in which every push stands by itself; without any there are none."""
    pushes = [missed for missed, num in counts.items() for _ in range(num)]
    if not pushes:
        assert staleness_of(counts) is None
        return
    found = staleness_of(counts)
    assert found is not None
    assert np.isclose(found.pop("mean"), np.mean(pushes))
    assert found == {
        "p50": np.quantile(pushes, 0.5, method="inverted_cdf"),
        "p95": np.quantile(pushes, 0.95, method="inverted_cdf"),
        "max": max(pushes),
    }
