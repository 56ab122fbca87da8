"""Local SGD on the simulated clock: rounds, and what waiting for an average costs."""

from __future__ import annotations

import numpy as np
import pytest
from sim_cases import in_ns, layered, link, profiled, with_profile

from fleetbench.stragglers import Jitter, SlowRank
from sim.run import simulate


def every(k_steps: int, begin_step: int = 1) -> dict[str, object]:
    """A strategy that averages every so many steps."""
    return {"localsgd": True, "localsgd_configs": {"k_steps": k_steps, "begin_step": begin_step}}


def test_a_round_by_hand() -> None:
    """Compute 300, update 10, merge 5, T = 20 + 400 after the update; K = 2 meets at 1, 3 and at the end.

    Rank 1 takes twice as long. Step 1: updates end at 310 and 610, the collective at 1030, the
    merge at 1035. Step 2 has no collective: 310 and 610 long. Step 3: rank 0 is at 1035 + 620 =
    1655, rank 1 at 1035 + 1220 = 2255, the collective ends at 2675.
    """
    slow = (SlowRank(ranks=(1,), factor=2.0),)
    experiment, profile = profiled(
        [([100], [200], 100, 200)], {"update": 10, "merge": 5}, inter=link(8, 10), stragglers=slow, strategy=every(2), steps=3
    )
    result = simulate(with_profile(experiment, profile))
    assert in_ns(result, "start_s") == [0, 1035, 1345, 0, 1035, 1645]
    assert in_ns(result, "arrival_s") == [310, None, 1655, 610, None, 2255]
    assert in_ns(result, "wait_s") == [300, 0, 600, 0, 0, 0]
    assert in_ns(result, "exposed_comm_s") == [420, 0, 420] * 2
    assert in_ns(result, "update_s") == [15, 10, 15] * 2
    assert result.summary.wall_s == pytest.approx(2680e-9)


def test_a_round_lasts_as_long_as_the_slowest_sum() -> None:
    """A round of K steps takes base x K x (1 + E[max over ranks of the mean of K draws]): numpy draws say the same.

    Four trainers, K = 8, exponential X of mean 0.5, free communication; both means have a standard error.
    """
    trainers, k_steps, rounds, base_ns = 4, 8, 300, 1_000_000
    jitter = (Jitter(distribution="exponential", mean=0.5),)
    experiment = layered(
        [(1, base_ns // 4, 3 * base_ns // 4)],
        nodes=trainers,
        inter=link(10**9),
        stragglers=jitter,
        strategy=every(k_steps),
        steps=1 + k_steps * rounds,
        seed=7,
    )
    steps = simulate(experiment, timeline=False).steps
    own = steps[steps["rank"] == 0]
    starts = own.loc[own["step"].isin(range(2, 2 + k_steps * rounds, k_steps)), "start_s"].to_numpy()
    lengths = np.diff(starts) / (base_ns * 1e-9)
    sample = np.random.default_rng(1).exponential(0.5, (200_000, trainers, k_steps)).mean(axis=2).max(axis=1)
    expected = k_steps * (1 + sample.mean())
    error = np.hypot(lengths.std() / np.sqrt(len(lengths)), k_steps * sample.std() / np.sqrt(len(sample)))
    assert len(lengths) == rounds - 1
    assert abs(lengths.mean() - expected) < 4 * error
    assert error < 0.02 * expected
