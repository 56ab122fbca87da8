"""What ranks share in a step, told apart from what each has by itself."""

from __future__ import annotations

import numpy as np
import pytest

from fleetbench.fitting.shocks import correlation, groups_of, split_shared
from fleetbench.fitting.stragglers import fit_stragglers
from fleetbench.stragglers import ONE, Jitter, NodeShock, SlowRank, draws

BASE_S = 0.020
SHOCK = NodeShock(scope="cluster", distribution="gamma", mean=0.3, cv=0.7)
OWN = Jitter(distribution="gamma", mean=0.1, cv=0.7)


def drawn(*entries: NodeShock | Jitter | SlowRank, ranks: int = 4, steps: int = 300, per_node: int = 1, seed: int = 2) -> np.ndarray:
    """Compute by rank and step, as the executors draw it."""
    return BASE_S * (1.0 + draws(entries, seed, ranks, per_node, 1, steps) / ONE)


def test_variances_are_those_of_the_parts() -> None:
    """Logarithms of spread 0.3 shared and 0.1 own, by ranks 2, 4 and 16: all within 4 standard errors."""
    generator = np.random.default_rng(0)
    steps = 4000
    for ranks in (2, 4, 16):
        common = generator.normal(0.0, 0.3, steps)
        own = generator.normal(0.0, 0.1, (ranks, steps))
        parts = split_shared(BASE_S * np.exp(common + own), [np.arange(ranks)])
        assert parts.common.std() == pytest.approx(np.hypot(0.3, 0.1 / np.sqrt(ranks)), abs=4 * 0.3 / np.sqrt(2 * steps))
        assert parts.noise == pytest.approx(0.1 / np.sqrt(ranks), rel=4 / np.sqrt(2 * steps * (ranks - 1)))
        assert np.log(parts.own).std() == pytest.approx(0.1, abs=4 * 0.1 / np.sqrt(2 * steps * (ranks - 1)))
        assert np.exp(parts.common.mean()) == pytest.approx(BASE_S, rel=0.02)


def test_equal_ranks_share_everything_and_independent_ones_nothing() -> None:
    """The same times on both ranks leave nothing to each; independent ones leave nothing common, but for chance."""
    same = np.repeat(drawn(OWN, ranks=1), 2, axis=0)
    parts = split_shared(same, [np.arange(2)])
    assert parts.own == pytest.approx(np.ones_like(same))
    assert parts.common[0] == pytest.approx(np.log(same[0]))
    assert parts.noise < 1e-12
    apart = split_shared(drawn(OWN, ranks=8), [np.arange(8)])
    assert apart.common.std() == pytest.approx(apart.noise, rel=0.15)


def test_who_is_slow_together_is_seen() -> None:
    """A shock of the cluster: all ranks; one a node: its ranks; jitter: nobody; nodes of one rank cannot share by themselves."""
    nodes = [0, 0, 1, 1]
    (everybody,) = groups_of(drawn(SHOCK, OWN, per_node=2), nodes)
    assert everybody.tolist() == [0, 1, 2, 3]
    a_node = NodeShock(distribution="gamma", mean=0.3, cv=0.7)
    assert [group.tolist() for group in groups_of(drawn(a_node, OWN, per_node=2), nodes)] == [[0, 1], [2, 3]]
    assert groups_of(drawn(OWN, per_node=2), nodes) == []
    assert groups_of(drawn(a_node, OWN, ranks=2), [0, 1]) == []


def test_correlation_is_spearmans() -> None:
    """Against scipy's own, of each pair; constant ranks have none."""
    from scipy import stats

    times = drawn(SHOCK, OWN, ranks=3, steps=50)
    expected = np.mean([stats.spearmanr(times[a], times[b]).statistic for a, b in ((0, 1), (0, 2), (1, 2))])
    assert correlation(times) == pytest.approx(expected)
    assert correlation(np.vstack([times[0], np.full(50, BASE_S)])) is None


def test_a_shared_shock_is_fitted_as_one() -> None:
    """Shock, jitter and a slow rank at once: scope, factor, both means and the base come back, and drawn again ranks wait as long."""
    times = drawn(SHOCK, OWN, SlowRank(ranks=(1,), factor=1.5))
    found = fit_stragglers(times, 0, nodes=[0, 1, 2, 3])
    slow, shock, jitter = found.entries
    assert isinstance(slow, SlowRank)
    assert isinstance(shock, NodeShock)
    assert isinstance(jitter, Jitter)
    assert (slow.ranks, slow.factor) == ((1,), pytest.approx(1.5, rel=0.04))
    assert (shock.scope, shock.rate) == ("cluster", 1.0)
    again = found.base * 1e-9 * (1.0 + draws(found.entries, 9, 4, 1, 1, 4000) / ONE)
    assert again.mean() == pytest.approx(times.mean(), rel=0.03)
    assert again.max(axis=0).mean() == pytest.approx(times.max(axis=0).mean(), rel=0.03)
    others = [0, 2, 3]
    longest = [(table[others].max(axis=0) / table[others].mean(axis=0)).mean() for table in (again, times)]
    assert longest[0] - 1 == pytest.approx(longest[1] - 1, rel=0.15)
    assert any("drawn once for all" in text for text in found.statements)


def test_ranks_of_one_node_share_a_shock_of_the_node() -> None:
    """So that another node, simulated beside it, has one of its own."""
    found = fit_stragglers(drawn(SHOCK, OWN), 0)
    assert [entry.scope for entry in found.entries if isinstance(entry, NodeShock)] == ["node"]
