from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.stragglers import (
    ONE,
    Blocks,
    Episode,
    Jitter,
    NodeShock,
    SlowNode,
    SlowRank,
    Straggler,
    _unit_interval,
    draws,
    splitmix64,
    stretch,
    uniform,
)

SPLITMIX64 = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
"""First outputs of the published generator for seed 1234567."""
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
ALL: tuple[Straggler, ...] = (
    Jitter(distribution="gamma", mean=0.2, cv=0.5),
    NodeShock(rate=0.3, mean=0.5),  # type: ignore[arg-type]  # NewTypes of numbers
    SlowRank(ranks=(3,), factor=1.5),
    SlowNode(nodes=(0,), factor=1.25),
    Episode(rate=0.05, length=4.0, factor=3.0),  # type: ignore[arg-type]  # NewTypes of numbers
    Blocks(values=((0.0, 0.1, 0.7), (0.2, 0.0, 0.4)), block_steps=2),
)


def delays(*stragglers: Straggler, trainers: int = 100, steps: int = 2000, seed: int = 7, per_node: int = 1) -> Any:
    """X as floats, shape (trainers, steps)."""
    return draws(stragglers, seed, trainers, per_node, 1, steps) / ONE


def test_the_hash_is_splitmix64() -> None:
    """``splitmix64`` is one output of the published generator for a state: the n-th output of seed s is splitmix64(s + (n - 1) gamma)."""
    states = [(1234567 + n * GOLDEN_GAMMA) % 2**64 for n in range(5)]
    assert tuple(int(splitmix64(np.uint64(state))) for state in states) == SPLITMIX64
    assert tuple(splitmix64(np.array(states, dtype=np.uint64))) == SPLITMIX64


def test_uniform_draws_are_uniform_and_never_0_or_1() -> None:
    """Moments of 200,000 draws within 4 standard errors; the extreme hashes lie half a cell inside (0, 1)."""
    u = uniform(1, 0, 0, np.arange(100), np.arange(2000)).ravel()
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / u.size)
    assert abs(u.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / u.size)
    assert len(np.unique(u)) == u.size
    lowest, highest = _unit_interval(np.array([0, 2**64 - 1], dtype=np.uint64)).tolist()
    assert 0.0 < lowest == 2.0**-53
    assert 1.0 > highest == 1.0 - 2.0**-53


def mix(word: int) -> int:
    """The published generator's output for a state, in Python's integers."""
    z = (word + GOLDEN_GAMMA) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def exponential(seed: int, entry: int, rank: int, step: int, mean: float) -> int:
    """X in units of 2^-24 of an exponential jitter: a chain of hashes over seed, entry, purpose 0, rank and step."""
    word = mix(mix(mix(mix(mix(seed) ^ entry) ^ 0) ^ rank) ^ step % 2**64)
    return round(-mean * math.log1p(-((word >> 12) + 0.5) / 2**52) * 2**24)


def test_a_draw_is_a_chain_of_published_hashes() -> None:
    """A second implementation, in Python's integers, gives the same X, in warm-up steps too."""
    entries = [Jitter(distribution="constant", mean=0.0), Jitter(distribution="exponential", mean=0.25)]
    expected = [[exponential(7, 1, rank, step, 0.25) for step in range(-2, 5)] for rank in range(3)]
    assert draws(entries, 7, 3, 1, -2, 7).tolist() == expected


@pytest.mark.parametrize(
    ("entry", "frozen"),
    [
        (Jitter(distribution="exponential", mean=0.25), [[3276911, 8130750, 6117583], [12232132, 1641262, 13366095]]),
        (Jitter(distribution="gamma", mean=0.25, cv=0.5), [[4065540, 6378894, 5497540], [8005097, 3010151, 8428387]]),
        (Jitter(distribution="lognormal", mean=0.25), [[3239249, 7185504, 5447995], [11294202, 2027206, 12581573]]),
        (Jitter(distribution="constant", mean=0.25), [[4194304] * 3] * 2),
        (NodeShock(rate=0.4, mean=0.25), [[3239249, 0, 5447995], [11294202, 2027206, 12581573]]),  # type: ignore[arg-type]  # NewTypes of numbers
        (Blocks(values=((0.0, 0.125, 0.75),), block_steps=1), [[2097152, 12582912, 12582912], [12582912, 0, 12582912]]),
        (
            Blocks(values=((0.0, 0.125, 0.75), (1.0, 0.5, 0.25)), block_steps=2),
            [[2097152, 12582912, 12582912], [8388608, 4194304, 4194304]],
        ),
    ],
    ids=str,
)
def test_draws_are_frozen(entry: Straggler, frozen: list[list[int]]) -> None:
    """Two ranks, steps 1 to 3, seed 7. These values freeze the counter scheme: another one would silently redraw every stored run.

    They were taken from this code, once the laws' moments and the second implementation above held;
    a change here is a change of what an experiment file means, and needs another schema.
    """
    assert draws([entry], 7, 2, 1, 1, 3).tolist() == frozen


def test_episodes_are_frozen() -> None:
    """As above, for the chain: of four ranks in six steps the last falls ill, at step 5."""
    episode = Episode(rate=0.25, length=2.0, factor=3.0)  # type: ignore[arg-type]  # NewTypes of numbers
    assert draws([episode], 7, 4, 1, 1, 6).tolist() == [[0] * 6, [0] * 6, [0] * 6, [0, 0, 0, 0, 2 * ONE, 2 * ONE]]


def kurtosis(law: str, cv: float) -> float:
    """Fourth central moment over the squared variance, from the laws' textbook formulas."""
    if law == "exponential":
        return 9.0
    if law == "gamma":
        return 3.0 + 6.0 * cv**2
    w = 1 + cv**2
    return w**4 + 2 * w**3 + 3 * w**2 - 3


@pytest.mark.parametrize(
    ("law", "cv"),
    [("exponential", 1.0), ("gamma", 0.3), ("gamma", 1.5), ("lognormal", 0.3), ("lognormal", 0.8)],
)
def test_each_law_has_its_mean_and_variation(law: Any, cv: float) -> None:
    """Mean and variance of 200,000 draws lie within 4 standard errors of what was asked for."""
    mean = 0.2
    x = delays(Jitter(distribution=law, mean=mean, cv=cv)).ravel()
    variance = (mean * cv) ** 2
    assert abs(x.mean() - mean) < 4 * math.sqrt(variance / x.size)
    assert abs(x.var() - variance) < 4 * variance * math.sqrt((kurtosis(law, cv) - 1) / x.size)
    assert x.min() >= 0


@given(
    trainers=st.integers(1, 8),
    extra=st.integers(1, 8),
    first=st.integers(-5, 30),
    steps=st.integers(1, 20),
    seed=st.integers(0, 2**64),
    kept=st.integers(1, len(ALL)),
)
def test_no_other_draw_shifts_a_draw(trainers: int, extra: int, first: int, steps: int, seed: int, kept: int) -> None:
    """A window's X is the slice of a longer one, of more trainers; a later entry that adds nothing changes nothing."""
    some = ALL[:kept]
    window = draws(some, seed, trainers, 2, first, steps)
    wide = draws((*some, SlowRank(ranks=(), factor=9.0)), seed, trainers + extra, 2, -7, 60)
    assert (window == wide[:trainers, first + 7 : first + 7 + steps]).all()


def test_entries_multiply_and_the_product_is_quantised_once() -> None:
    """1 + X is the product of the entries' 1 + X, rounded to 2^-24 at the end only."""
    thirds = (SlowRank(ranks=(0,), factor=4 / 3), SlowRank(ranks=(0,), factor=4 / 3), SlowNode(nodes=(0,), factor=4 / 3))
    assert draws(thirds, 0, 1, 1, 1, 1)[0, 0] == round((64 / 27 - 1) * 2**24)
    assert draws((), 0, 2, 1, 1, 3).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_node_shock_hits_all_ranks_of_a_node_alike() -> None:
    """Ranks of a node share X, nodes do not, and the share of steps that are hit is the rate."""
    x = delays(NodeShock(rate=0.3), trainers=40, per_node=2, steps=5000)  # type: ignore[arg-type]  # a NewType of float
    assert (x[0::2] == x[1::2]).all()
    assert (x[0] != x[2]).any()
    hit = (x[0::2] > 0).mean()
    assert abs(hit - 0.3) < 4 * math.sqrt(0.3 * 0.7 / x[0::2].size)


def test_episodes_have_their_stationary_share_and_geometric_lengths() -> None:
    """A chain with rate r and mean length L is ill r / (r + 1 / L) of the time; lengths are geometric with mean L."""
    rate, length = 0.05, 4.0
    x = delays(Episode(rate=rate, length=length, factor=3.0), trainers=200, steps=2000)  # type: ignore[arg-type]  # NewTypes of numbers
    assert set(np.unique(x)) == {0.0, 2.0}
    ill = x > 0
    share = rate / (rate + 1 / length)
    correlation = 1 - rate - 1 / length  # of a step with the next, for a two-state chain
    error = math.sqrt(share * (1 - share) / ill.size * (1 + correlation) / (1 - correlation))
    assert abs(ill[:, 100:].mean() - share) < 4 * error
    lengths = np.array([run for row in ill for run in runs(row)])
    assert abs(lengths.mean() - length) < 4 * math.sqrt(length * (length - 1) / len(lengths))
    for longest in (1, 2, 5):
        expected = 1 - (1 - 1 / length) ** longest
        assert abs((lengths <= longest).mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / len(lengths))


def runs(row: Any) -> list[int]:
    """Lengths of the stretches of true values that both begin and end inside the row."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], row, [False])).astype(int)))
    return [int(end - begin) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end < len(row)]


def test_warm_up_steps_are_healthy() -> None:
    """An episode begins at step 1 at the earliest."""
    episode = Episode(rate=1.0, length=1e9, factor=2.0)  # type: ignore[arg-type]  # NewTypes of numbers
    assert draws([episode], 0, 1, 1, -2, 5).tolist() == [[0, 0, 0, ONE, ONE]]
    assert draws([episode], 0, 1, 1, -2, 2).tolist() == [[0, 0]]


def test_blocks_are_consecutive_measured_steps() -> None:
    """Two measured ranks, blocks of three of five steps: all ranks of a pair are at the same place, which the published hash draws."""
    values = ((0.0, 0.1, 0.2, 0.3, 0.4), (1.0, 1.1, 1.2, 1.3, 1.4))
    x = draws([Blocks(values=values, block_steps=3)], 7, 5, 1, -2, 9)
    for rank in range(5):
        for step in range(-2, 7):
            number, within = divmod(step - 1, 3)
            word = mix(mix(mix(mix(mix(7) ^ 0) ^ 0) ^ rank // 2) ^ (number + 1) % 2**64)
            first = int(((word >> 12) + 0.5) / 2**52 * 5)
            assert x[rank, step + 2] == round(values[rank % 2][(first + within) % 5] * ONE)


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": "slow_rank", "ranks": [0], "factor": 1e18},
        {"kind": "slow_node", "nodes": [0], "factor": 1e7},
        {"kind": "episode", "rate": "1 /step", "length": "2 steps", "factor": 1e7},
        {"kind": "jitter", "mean": 1e200},
        {"kind": "jitter", "cv": 1e200},
        {"kind": "blocks", "values": [[0, 1e12]], "block_steps": 1},
    ],
    ids=str,
)
def test_a_delay_that_no_clock_can_count_is_refused(entry: dict[str, Any]) -> None:
    """More than a million times the own compute is an error of the file, not an overflow of the run."""
    with pytest.raises(ConfigError, match=r"cluster\.stragglers\[0\].*(at most 1000000|above a million)"):
        Experiment.from_dict({"cluster": {"stragglers": [entry]}})


def test_a_product_that_no_clock_can_count_names_the_entry_that_made_it() -> None:
    """Entries multiply: each is fine alone, and the second takes rank 1 beyond a million; a million itself is counted."""
    entries = [SlowRank(ranks=(0, 1), factor=1e3), SlowRank(ranks=(1,), factor=1e3), SlowNode(nodes=(0,), factor=2.0)]
    assert draws(entries[:2], 0, 2, 1, 1, 1).tolist() == [[999 * ONE], [999_999 * ONE]]
    assert draws(entries, 0, 1, 1, 1, 1).tolist() == [[1999 * ONE]]
    with pytest.raises(ConfigError, match=r"cluster\.stragglers\[2\].*2e\+06 times"):
        draws(entries, 0, 2, 2, 1, 1)


@given(base=st.integers(0, 10**13), x=st.integers(0, 100 * ONE))
def test_stretching_rounds_once_to_the_nearest_nanosecond(base: int, x: int) -> None:
    """(1 + X) base, half up; numpy's integers give the same as Python's."""
    twice = 2 * base * (ONE + x)
    expected = (twice + ONE) // (2 * ONE)
    assert stretch(base, x) == expected
    assert stretch(np.int64(base), np.int64(x)) == expected  # type: ignore[arg-type]  # numpy's integers come from arrays
    assert abs(expected * ONE - base * (ONE + x)) * 2 <= ONE
