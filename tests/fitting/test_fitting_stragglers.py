"""Straggler models: what was drawn is taken apart again, and what tells too little is said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fleetbench.cluster import Cluster
from fleetbench.fitting.episodes import find_episodes
from fleetbench.fitting.stragglers import fit_stragglers, rank_factors
from fleetbench.stragglers import ONE, Empirical, Episode, Jitter, SlowRank, Straggler, draws

BASE_S = 0.010


def drawn(entries: Sequence[Straggler], ranks: int, steps: int, seed: int = 1) -> np.ndarray:
    """Compute by rank and step, as the executors draw it."""
    return BASE_S * (1.0 + draws(entries, seed, ranks, ranks, 1, steps) / ONE)


JITTER = Jitter(distribution="exponential", mean=0.1)
SLOW = SlowRank(ranks=(1,), factor=1.5)
EPISODES = Episode(rate=0.02, length=15.0, factor=2.0)  # type: ignore[arg-type]  # numbers of their units


def test_jitter_alone_is_jitter_alone() -> None:
    """No rank factor and no episode is seen in 800 steps of two ranks; the law's mean is within 10 %."""
    found = fit_stragglers(drawn([JITTER], 2, 400), seed=0)
    (entry,) = found.entries
    assert isinstance(entry, Jitter)
    assert entry.distribution == "exponential"
    assert entry.mean == pytest.approx(0.1, rel=0.10)
    assert found.base * 1e-9 == pytest.approx(BASE_S, rel=0.005)
    assert found.rank_factors == (1.0, 1.0)
    assert found.correlation == pytest.approx(0.0, abs=0.15)
    assert found.jitter is not None
    assert min(found.jitter.kolmogorov_smirnov_p, found.jitter.anderson_darling_p) > 0.02


def test_factor_episodes_and_jitter_are_told_apart() -> None:
    """All three at once over four ranks: both factors within 3 %, and rate and length within 15 % of what the chain really did."""
    ill = draws([SlowRank(ranks=(), factor=1.0), SlowRank(ranks=(), factor=1.0), EPISODES], 1, 4, 4, 1, 400) > 0  # the third entry's draws
    starts, ends = int((ill[:, 1:] & ~ill[:, :-1]).sum() + ill[:, 0].sum()), int((~ill[:, 1:] & ill[:, :-1]).sum())
    found = fit_stragglers(drawn([JITTER, SLOW, EPISODES], 4, 400), seed=0)
    slow, episode, jitter = found.entries
    assert isinstance(slow, SlowRank)
    assert slow.ranks == (1,)
    assert slow.factor == pytest.approx(1.5, rel=0.03)
    assert isinstance(episode, Episode)
    assert episode.factor == pytest.approx(2.0, rel=0.03)
    assert episode.rate == pytest.approx(starts / (~ill).sum(), rel=0.15)
    assert episode.length == pytest.approx(ill.sum() / ends, rel=0.15)
    assert isinstance(jitter, Jitter)
    assert jitter.mean == pytest.approx(0.1, rel=0.15)
    assert found.base * 1e-9 == pytest.approx(BASE_S, rel=0.01)


def test_the_model_draws_what_it_was_fitted_to() -> None:
    """Drawn again from the fitted entries over the fitted base, mean and 95th percentile are the measured ones within 4 and 8 %."""
    times = drawn([JITTER, SLOW, EPISODES], 4, 400)
    found = fit_stragglers(times, seed=0)
    again = found.base * 1e-9 * (1.0 + draws(found.entries, 7, 4, 4, 1, 4000) / ONE)
    assert again.mean() == pytest.approx(times.mean(), rel=0.04)
    assert np.quantile(again, 0.95) == pytest.approx(np.quantile(times, 0.95), rel=0.08)
    Cluster(trainers_per_node=4, stragglers=found.entries)  # and a cluster takes them


def test_skewed_single_steps_are_no_episodes() -> None:
    """A heavy tail without memory: one step in a hundred is several times as long, and none of it comes together."""
    found = find_episodes(drawn([Jitter(distribution="pareto", mean=0.3, cv=3.0)], 3, 400))
    assert found.factor is None
    assert "one by one" in found.statement


@pytest.mark.parametrize("seed", range(4))
def test_the_evidence_for_episodes_grows_with_memory(seed: int) -> None:
    """The same steps in another order have no episodes left."""
    times = drawn([JITTER, EPISODES], 2, 300, seed)
    assert find_episodes(times).factor == pytest.approx(2.0, rel=0.1)
    shuffled = np.random.default_rng(seed).permuted(times, axis=1)
    assert find_episodes(shuffled).factor is None


def test_a_rank_that_is_slow_in_one_part_of_the_run_only_is_no_slow_rank() -> None:
    """Twice as slow in the first fifth, and as quick as the other one for the rest."""
    times = drawn([JITTER], 2, 200)
    times[1, :40] *= 2
    factors, said = rank_factors(times)
    assert factors == [1.0, 1.0]
    assert "no rank" in said


@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("steps", [20, 60])
@pytest.mark.parametrize("law", ["exponential", "lognormal", "normal"])
def test_equal_ranks_are_seldom_called_slow(ranks: int, steps: int, law: str) -> None:
    """In at most 5 % of runs, however many ranks could be the slowest: of 200 runs, within three standard errors."""
    generator = np.random.default_rng(ranks + steps)
    shape = (200, ranks, steps)
    x = {
        "exponential": 0.3 * generator.exponential(1.0, shape),
        "lognormal": 0.1 * generator.lognormal(0.0, 1.0, shape),
        "normal": 0.03 * generator.normal(0.0, 1.0, shape),
    }[law]
    found = sum(max(rank_factors(BASE_S * (1 + run))[0]) > 1 for run in x)
    assert found / 200 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 200)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_slow_rank_is_found_among_many(ranks: int) -> None:
    """One and a half times as long, in forty steps with jitter of 30 %: in every one of twenty runs, and nobody beside it."""
    for seed in range(20):
        times = BASE_S * (1 + 0.3 * np.random.default_rng(seed).exponential(1.0, (ranks, 40)))
        times[1] *= 1.5
        factors, _ = rank_factors(times)
        assert factors[1] == pytest.approx(1.5, rel=0.2)
        assert sum(factor > 1 for factor in factors) <= 2


def test_few_steps_tell_no_slow_rank() -> None:
    """Six steps, or nineteen, even of a rank that takes twice as long: it may have been slow for a while."""
    for steps in (6, 19):
        times = np.full((4, steps), BASE_S)
        times[2] *= 2
        factors, said = rank_factors(times)
        assert factors == [1.0] * 4
        assert f"too few steps to tell a slow rank: {steps} a rank" in said


def test_ranks_that_are_late_together_are_said() -> None:
    """The same X on both ranks: a correlation of 1, and a warning that independent draws wait too often."""
    times = np.repeat(drawn([JITTER], 1, 200), 2, axis=0)
    found = fit_stragglers(times, seed=0)
    assert found.correlation == pytest.approx(1.0)
    assert any("same steps" in text for text in found.statements)


@pytest.mark.slow
def test_times_that_no_law_fits_are_kept_as_they_are() -> None:
    """Two sharp peaks: the entry draws from the measured values, and says so."""
    generator = np.random.default_rng(0)
    times = BASE_S * np.where(generator.random((2, 200)) < 0.5, 1.0, 1.3) * (1 + 0.002 * generator.random((2, 200)))
    found = fit_stragglers(times, seed=0)
    entry = found.entries[-1]
    assert isinstance(entry, Empirical)
    assert found.base * 1e-9 * (1 + np.mean(entry.values)) == pytest.approx(times.mean(), rel=0.01)
    assert any("no law fits" in text for text in found.statements)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (np.full((2, 100), 0.01), "constant"),
        (np.full((1, 100), 0.01), "one rank"),
        (np.array([[0.010, 0.011, 0.012]]), "law of jitter: 3, and 30"),
        (np.array([[0.010, 0.011, 0.012], [0.010, 0.013, 0.012]]), "law of jitter: 6, and 30"),
        (np.array([[0.01]]), "too few"),
    ],
)
def test_what_tells_too_little_is_said(times: np.ndarray, said: str) -> None:
    """Constant times, one rank, three samples: no entry, the median as the base, and a statement; no crash."""
    found = fit_stragglers(times, seed=0)
    assert found.entries == ()
    assert found.jitter is None
    assert found.base == found.median == round(np.median(times) * 1e9)
    assert any(said in text for text in found.statements)


def test_nearly_constant_times_are_fitted_without_a_warning() -> None:
    """A spread of half a per cent, some steps equal to the nanosecond: the mean comes back to a tenth of it."""
    generator = np.random.default_rng(0)
    times = BASE_S * (1 + 0.005 * np.round(generator.random((2, 100)), 1))
    found = fit_stragglers(times, seed=0)
    assert found.base * 1e-9 <= times.min() * 1.0005
    (entry,) = found.entries
    mean = np.mean(entry.values) if isinstance(entry, Empirical) else entry.mean  # type: ignore[union-attr]  # jitter otherwise
    assert found.base * 1e-9 * (1 + mean) == pytest.approx(times.mean(), rel=5e-4)
