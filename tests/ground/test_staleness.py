"""Staleness of pushes, against numpy's quantiles of the pushes written out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.staleness import ServerLoad, counts_of, load_of, quantiles_of


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 40), max_size=12))
def test_counts_say_what_the_pushes_say(counts: dict[int, int]) -> None:
    """Mean, quantiles and maximum are those of the list in which every push stands by itself; without any there are none."""
    pushes = [missed for missed, num in counts.items() for _ in range(num)]
    if not pushes:
        assert quantiles_of(counts) is None
        return
    found = quantiles_of(counts)
    assert found is not None
    assert np.isclose(found.pop("mean"), np.mean(pushes))
    assert found == {
        "p50": np.quantile(pushes, 0.5, method="inverted_cdf"),
        "p95": np.quantile(pushes, 0.95, method="inverted_cdf"),
        "max": max(pushes),
    }


def test_a_job_has_its_servers_mean_load_and_all_their_staleness() -> None:
    """8 gradients in 4 s and 3 in 1 s are 2.5 a second; busy for a half and a quarter; one that never had to work counts as idle."""
    two = [ServerLoad(), ServerLoad(since_ns=3 * 10**9)]
    for load, took_s, until_s, counts in ((two[0], 2.0, 4, {0: 6, 2: 2}), (two[1], 0.25, 4, {2: 1, 10: 2})):
        load.worked(int(took_s * 10**9), until_s * 10**9)
        load.staleness.update(counts)
    assert load_of(two) == {"gradients_per_s": 2.5, "utilisation": 0.375, "staleness_histogram": {"0": 6, "2": 3, "10": 2}}
    assert list(load_of(two)["staleness_histogram"]) == ["0", "2", "10"]
    assert counts_of(two) == {0: 6, 2: 3, 10: 2}
    assert load_of([ServerLoad()])["utilisation"] == 0
    assert quantiles_of(counts_of([])) is None
