"""Gradient merge, updates by bucket and sequential execution on the simulated clock, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from sim_cases import in_ns, layered, link, profiled, with_profile

from fleetbench.result import RunResult
from fleetbench.stragglers import SlowRank
from sim.run import simulate

A_AND_B = [([250], [600], 100, 200), ([500], [400], 300, 400)]
BY_BUCKET = {"build_strategy": {"enable_backward_optimizer_op_deps": False}}


def merging(k_steps: int = 2, **configs: Any) -> dict[str, Any]:
    """A strategy in which so many steps share an update."""
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k_steps, **configs}}


def run(strategy: dict[str, Any], **options: Any) -> RunResult:
    """Compute 300, a bucket of 400 bytes at its end, T = 20 + 400, update 10, merge 5."""
    experiment, profile = profiled([([100], [200], 100, 200)], {"update": 10, "merge": 5}, inter=link(8, 10), strategy=strategy, **options)
    return simulate(with_profile(experiment, profile))


@pytest.mark.parametrize("k_steps", [1, 3, 4])
def test_gradient_merge_makes_steps_over_k_exchanges(k_steps: int) -> None:
    """12 steps make 12 / k all-reduces of each bucket, and trainers wait for each other there only."""
    slow = (SlowRank(ranks=(1,), factor=2.0),)
    result = simulate(
        layered(
            [(250, 100, 200), (500, 300, 400)],
            inter=link(8, 10),
            stragglers=slow,
            steps=12,
            strategy=merging(k_steps) if k_steps > 1 else {},
        )
    )
    carried = [span for span in result.spans if span.rank == 0 and span.stream == "communication"]
    assert len(carried) == 2 * 12 // k_steps
    waited = result.steps[(result.steps["rank"] == 0) & (result.steps["wait_s"] > 0)]
    assert list(waited["step"]) == list(range(k_steps, 13, k_steps))


@pytest.mark.parametrize(
    ("remainder", "exchanged"),
    [("carry", [2, 4, 6]), ("flush", [2, 3, 5, 6]), ("drop", [2, 5])],
)
def test_what_an_epoch_leaves_over(remainder: str, exchanged: list[int]) -> None:
    """With k = 2 in epochs of three steps: carried to 4 and 6, applied at 3 and 6, or dropped at 3 and 6."""
    result = run(merging(remainder=remainder), steps=6, warmup_steps=2, also={"steps_per_epoch": 3})
    own = result.steps[(result.steps["rank"] == 0) & (result.steps["step"] >= 1)]
    assert list(own.loc[own["bytes_sent"] > 0, "step"]) == exchanged
    assert list(own.loc[own["update_s"] > 0, "step"]) == exchanged


def by_bucket(gbit_per_s: float, **options: Any) -> RunResult:
    """Updates by bucket; b is ready at 800 and a at 1000, T = 20 + S, and 30 ns of update are 20 for b and 10 for a."""
    experiment, profile = profiled(A_AND_B, {"update": 30}, inter=link(gbit_per_s, 10), strategy=BY_BUCKET, **options)
    return simulate(with_profile(experiment, profile))


def test_a_bucket_updates_beside_the_backward() -> None:
    """Bucket b travels from 800 to 840 and updates until 860, hidden; a travels from 1000 to 1030 and updates until 1040."""
    result = by_bucket(800, steps=2)
    assert in_ns(result, "backward_s") == [600] * 4
    assert in_ns(result, "exposed_comm_s") == [30] * 4
    assert in_ns(result, "update_s") == [10] * 4
    assert in_ns(result, "start_s") == [0, 1_040] * 2
    updates = [(span.start_ns, span.duration_ns) for span in result.spans if span.rank == 0 and span.stream == "update"]
    assert updates == [(840, 20), (1_030, 10), (1_880, 20), (2_070, 10)]


def test_what_else_is_averaged_takes_its_time() -> None:
    """K = 2 under Adam: 420 for the parameters, 20 + 800 for two tensors of state, 20 + 60 for 60 bytes of buffers; then merge 5."""
    averaged = {"localsgd": True, "localsgd_configs": {"k_steps": 2, "buffers": "average", "optimizer_state": "average"}}
    experiment, profile = profiled(
        [([100], [200], 100, 200)],
        {"merge": 5, "buffers_nbytes": 60},
        inter=link(8, 10),
        strategy=averaged,
        also={"optimizer": "adam"},
        steps=2,
    )
    result = simulate(with_profile(experiment, profile))
    assert in_ns(result, "exposed_comm_s") == [420 + 820 + 80] * 4
    assert list(result.steps["bytes_sent"]) == [400 + 800 + 60] * 4
