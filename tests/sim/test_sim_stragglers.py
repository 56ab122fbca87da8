"""Stragglers in the simulator: closed forms, and draws that nothing shifts."""

from __future__ import annotations

import pandas as pd
import pytest
from sim_cases import layered, link

from fleetbench.result import RunResult
from fleetbench.stragglers import Blocks, Jitter, SlowRank
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


def test_more_steps_and_another_strategy_shift_no_draw() -> None:
    """Common random numbers: a longer run of another strategy computes the same first steps."""
    options = {"inter": link(8), "stragglers": (Jitter(mean=0.5),)}
    short = simulate(layered([(250, 10_000, 20_000)], steps=10, **options))
    local = {"localsgd": True, "localsgd_configs": {"k_steps": 4}}
    long = simulate(layered([(250, 10_000, 20_000)], steps=15, warmup_steps=3, strategy=local, **options))
    for rank in (0, 1):
        assert compute(short, rank) == compute(long, rank)[3:13]


def test_both_engines_draw_the_same_blocks() -> None:
    """Three ranks from two measured ones, warm-up and a block that the run's end cuts: every time is equal."""
    stragglers = (SlowRank(ranks=(1,), factor=1.5), Blocks(values=((0.0, 0.1, 0.7, 0.2), (0.2, 0.0, 0.4, 0.9)), block_steps=3))
    experiment = layered([(250, 10_000, 20_000)], nodes=3, inter=link(8), stragglers=stragglers, steps=20, warmup_steps=2)
    reference, vector = (simulate(experiment, engine=engine).steps for engine in ("reference", "vector"))
    pd.testing.assert_frame_equal(reference, vector)
    assert reference["forward_s"].nunique() > 4


def test_the_seed_is_what_draws() -> None:
    """Another seed, other delays."""
    options = {"inter": link(8), "stragglers": (Jitter(mean=0.5),), "steps": 10}
    assert compute(simulate(layered([(250, 10_000, 20_000)], seed=1, **options)), 0) != compute(
        simulate(layered([(250, 10_000, 20_000)], seed=2, **options)), 0
    )
