"""Straggler models: draws are as the measured steps were, slow ranks are found, and what tells too little is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from sim_cases import layered, link

from fleetbench.cluster import Cluster
from fleetbench.fitting.stragglers import fit_stragglers, rank_factors
from fleetbench.measurements import StragglerFit
from fleetbench.profile import Profile
from fleetbench.report.folder import measured_cluster
from fleetbench.stragglers import ONE, Blocks, Jitter, NodeShock, SlowRank, Straggler, draws
from sim.run import simulate

BASE_S = 0.010
SHARES = (0.5, 0.95, 0.99)
JITTER = Jitter(distribution="exponential", mean=0.1)


def drawn(entries: Sequence[Straggler], ranks: int, steps: int, seed: int = 1) -> np.ndarray:
    """Compute by rank and step, as the executors draw it."""
    return BASE_S * (1.0 + draws(entries, seed, ranks, ranks, 1, steps) / ONE)


def autoregressive(generator: np.random.Generator, memory: float, spread: float, *shape: int) -> np.ndarray:
    """AR(1) processes along the last axis, stationary, with this standard deviation."""
    noise = generator.normal(0.0, spread, shape)
    for step in range(1, shape[-1]):
        noise[..., step] = memory * noise[..., step - 1] + np.sqrt(1 - memory**2) * noise[..., step]
    return noise


def measured(steps: int, seed: int) -> np.ndarray:
    """Four ranks, the third 1.4 times as slow: own and common noise with memory, and common shocks that last for three steps."""
    generator = np.random.default_rng(seed)
    hits = (generator.random(steps) < 0.05) * generator.exponential(0.3, steps)
    shocks = np.convolve(hits, (1.0, 0.6, 0.3))[:steps]
    noise = autoregressive(generator, 0.8, 0.1, steps) + autoregressive(generator, 0.5, 0.05, 4, steps)
    return BASE_S * np.exp(noise) * (1 + shocks) * np.array([[1.0], [1.0], [1.4], [1.0]])


def simulated(stragglers: StragglerFit, folder: Path, steps: int = 40_000) -> np.ndarray:
    """Compute by rank and step of a simulation of a profile's file."""
    Profile(machine="", created="", tables=(), stragglers=stragglers).save(folder / "profile.toml")
    base_ns = stragglers.base
    experiment = layered([(1, base_ns // 3, base_ns - base_ns // 3)], nodes=4, inter=link(80), steps=steps, warmup_steps=0)
    cluster = measured_cluster(experiment.cluster, Profile.load(folder / "profile.toml"))
    table = simulate(experiment.replace(cluster=cluster), timeline=False).steps
    return (table["forward_s"] + table["backward_s"]).to_numpy()[np.lexsort((table["step"], table["rank"]))].reshape(4, steps)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(3))
def test_a_profile_draws_the_steps_that_were_measured(seed: int, tmp_path: Path) -> None:
    """Of each rank and of the slowest one, 50, 95 and 99 % of the steps are as short within 3 %; steps are as alike as their neighbours."""
    times = measured(5000, seed)
    found = fit_stragglers(times)
    again = simulated(found, tmp_path)
    assert np.quantile(again, SHARES, axis=1) == pytest.approx(np.quantile(times, SHARES, axis=1), rel=0.03)
    slowest, slowest_again = times.max(axis=0), again.max(axis=0)
    assert np.quantile(slowest_again, SHARES) == pytest.approx(np.quantile(slowest, SHARES), rel=0.03)
    assert np.corrcoef(slowest_again[1:], slowest_again[:-1])[0, 1] == pytest.approx(np.corrcoef(slowest[1:], slowest[:-1])[0, 1], abs=0.03)
    slow, blocks = found.entries
    assert isinstance(slow, SlowRank)
    assert (slow.ranks, slow.factor) == ((2,), pytest.approx(1.4, rel=0.01))
    assert isinstance(blocks, Blocks)


def test_few_steps_are_drawn_as_they_are() -> None:
    """In forty thousand draws of 400 steps, every measured value has its share, and ranks' values of a step stay together."""
    times = drawn([JITTER, NodeShock(mean=0.2)], 2, 400)
    found = fit_stragglers(times)
    (blocks,) = found.entries
    assert isinstance(blocks, Blocks)
    assert blocks.block_steps == 40
    again = found.base * 1e-9 * (1 + draws(found.entries, 3, 2, 2, 1, 40_000) / ONE)
    nearest = np.abs(again[0, :, None] - times[0]).argmin(axis=1)
    assert again[1] == pytest.approx(times[1, nearest], rel=1e-6)
    assert (np.bincount(nearest, minlength=400) > 0).all()
    assert (np.diff(nearest) % 400 == 1).mean() == pytest.approx(1 - 1 / 40, abs=0.005)
    Cluster(trainers_per_node=2, stragglers=found.entries)  # and a cluster takes them


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


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (np.full((2, 100), 0.01), "constant"),
        (np.full((1, 100), 0.01), "one rank"),
        (np.array([[0.010, 0.011, 0.012]]), "draw from: 3 a rank, and 5"),
        (np.array([[0.010, 0.011, 0.012], [0.010, 0.013, 0.012]]), "slow rank: 3 a rank, and 20"),
        (np.array([[0.01]]), "too few"),
    ],
)
def test_what_tells_too_little_is_said(times: np.ndarray, said: str) -> None:
    """Constant times, one rank, three samples: no entry, the median as the base, and a statement; no crash."""
    found = fit_stragglers(times)
    assert found.entries == ()
    assert found.base == found.median == round(np.median(times) * 1e9)
    assert any(said in text for text in found.statements)


def test_a_constant_slow_rank_is_a_factor_alone() -> None:
    """Nothing varies, so nothing is drawn; a rank is slow all the same."""
    times = np.full((3, 40), BASE_S)
    times[1] *= 2
    found = fit_stragglers(times)
    assert found.entries == (SlowRank(ranks=(1,), factor=2.0),)
    assert found.base == round(BASE_S * 1e9)
