"""Stragglers in the simulator: closed forms, and draws that nothing shifts."""

from __future__ import annotations

import pytest
from sim_cases import layered, link

from fleetbench.result import RunResult
from fleetbench.stragglers import Jitter, SlowRank
from sim.run import simulate


@pytest.mark.parametrize("trainers", [2, 8, 32])
def test_exponential_delays_cost_the_harmonic_number(trainers: int) -> None:
    """X exponential, communication free: the mean step is base x (1 + mean x H_N), within 4 standard errors."""
    base_ns, mean, steps = 1_000_000, 0.4, 1000
    jitter = (Jitter(distribution="exponential", mean=mean),)
    experiment = layered([(1, base_ns // 4, 3 * base_ns // 4)], nodes=trainers, inter=link(10**9), stragglers=jitter, steps=steps, seed=11)
    table = simulate(experiment, timeline=False).steps
    own = table[table["rank"] == 0]
    lengths = own[["forward_s", "backward_s", "wait_s", "exposed_comm_s"]].sum(axis=1) / (base_ns * 1e-9)
    harmonic = sum(1 / n for n in range(1, trainers + 1))
    error = lengths.std() / steps**0.5
    assert abs(lengths.mean() - (1 + mean * harmonic)) < 4 * error
    assert error < 0.02


def compute(result: RunResult, rank: int) -> list[float]:
    """A rank's forward times."""
    return list(result.steps.loc[result.steps["rank"] == rank, "forward_s"])


def test_a_new_trainer_shifts_no_draw() -> None:
    """Ranks 0 and 1 compute as long among three as among two."""
    options = {"inter": link(8), "stragglers": (Jitter(mean=0.5),), "steps": 20}
    two = simulate(layered([(250, 10_000, 20_000)], nodes=2, **options))
    three = simulate(layered([(250, 10_000, 20_000)], nodes=3, **options))
    for rank in (0, 1):
        assert compute(two, rank) == compute(three, rank)
    assert len({*compute(three, 0), *compute(three, 1), *compute(three, 2)}) > 50


def test_a_new_entry_shifts_no_draw() -> None:
    """A slow rank after the jitter doubles that rank's compute, to the rounding, and no other's."""
    jitter = Jitter(mean=0.5)
    options = {"inter": link(8), "steps": 20}
    alone = simulate(layered([(250, 10_000, 20_000)], stragglers=(jitter,), **options))
    beside = simulate(layered([(250, 10_000, 20_000)], stragglers=(jitter, SlowRank(ranks=(1,), factor=2.0)), **options))
    assert compute(alone, 0) == compute(beside, 0)
    assert [2 * value for value in compute(alone, 1)] == pytest.approx(compute(beside, 1), abs=2e-9)
