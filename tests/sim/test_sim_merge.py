"""Gradient merge, updates by bucket and sequential execution on the simulated clock, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from sim_cases import carried_ns, in_ns, layered, link, profiled, with_profile

from fleetbench.errors import ConfigError
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


def test_gradient_merge_exchanges_on_every_kth_step() -> None:
    """With k = 2: steps 1 and 3 are 300 ns of compute, steps 2 and 4 take 300 + 420 + 10."""
    result = run(merging(), steps=4)
    assert in_ns(result, "start_s") == [0, 300, 1_030, 1_330] * 2
    assert in_ns(result, "exposed_comm_s") == [0, 420, 0, 420] * 2
    assert in_ns(result, "update_s") == [0, 10, 0, 10] * 2
    assert in_ns(result, "arrival_s") == [None, 600, None, 1_630] * 2
    assert list(result.steps["bytes_sent"]) == [0, 400, 0, 400] * 2
    assert result.steps["local_steps"].fillna(0).tolist() == [0, 1, 0, 1] * 2
    assert result.summary.num_syncs == 2


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


def test_a_remainder_needs_epochs() -> None:
    """What an epoch leaves over is known only with its length."""
    with pytest.raises(ConfigError, match=r"gradient_merge_configs\.remainder") as caught:
        run(merging(remainder="drop"))
    assert "steps_per_epoch" in (caught.value.hint or "")
    run(merging())


def test_local_sgd_counts_updates_of_merged_gradients() -> None:
    """K = 2 over k = 2: updates at steps 2, 4, 6, ... meet at updates 1, 3, 5, so at steps 2, 6 and 10."""
    result = run(merging() | {"localsgd": True, "localsgd_configs": {"k_steps": 2}}, steps=10)
    own = result.steps[result.steps["rank"] == 0]
    assert list(own.loc[own["bytes_sent"] > 0, "step"]) == [2, 6, 10]
    assert in_ns(result, "update_s")[:10] == [0, 15, 0, 10, 0, 15, 0, 10, 0, 15]
    assert own["local_steps"].fillna(0).tolist() == [0, 1, 0, 0, 0, 2, 0, 0, 0, 2]


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


def test_updates_between_collectives_are_update_and_not_stall() -> None:
    """Bucket b travels until 2820 and updates until 2840, while a travels until 3840 and updates until 3850."""
    result = by_bucket(8)
    assert in_ns(result, "exposed_comm_s") == [1_820 + 1_000] * 2
    assert in_ns(result, "update_s") == [30] * 2
    waits = [(span.start_ns, span.duration_ns) for span in result.spans if span.rank == 0 and span.name == "wait"]
    assert waits == [(1_000, 1_820), (2_840, 1_000)]


def test_updates_take_turns() -> None:
    """Long updates, 2000 and 1000 ns: b's from 840 hides 160 ns, a's has to wait for it until 2840 and ends at 3840."""
    experiment, profile = profiled(A_AND_B, {"update": 3_000}, inter=link(800, 10), strategy=BY_BUCKET, steps=2)
    result = simulate(with_profile(experiment, profile))
    assert in_ns(result, "update_s") == [2_840] * 4
    assert in_ns(result, "exposed_comm_s") == [0] * 4
    assert in_ns(result, "start_s") == [0, 3_840] * 2


def test_the_shares_of_an_update_are_the_whole() -> None:
    """One trainer, 10 ns over three equal buckets: 3, 4 and 3 ns, in all 10, however they are rounded."""
    experiment, profile = profiled([([7, 7, 7], [10, 20, 200], 100, 200)], {"update": 10}, nodes=1, strategy=BY_BUCKET)
    result = simulate(with_profile(experiment, profile))
    assert [(s.start_ns, s.duration_ns) for s in result.spans if s.stream == "update"] == [(110, 3), (120, 4), (300, 3)]
    assert in_ns(result, "update_s") == [3]


def test_sequential_execution_hides_nothing() -> None:
    """Bucket b holds the backward up from 800 to 2820, a is ready at 3020 and travels until 4040, where the backward ends."""
    strategy = {"build_strategy": {"enable_sequential_execution": True}}
    result = simulate(layered([(250, 100, 200), (500, 300, 400)], inter=link(8, 10), strategy=strategy))
    assert carried_ns(result) == {"all_reduce 0": (800, 2_820), "all_reduce 1": (3_020, 4_040)}
    assert in_ns(result, "backward_s") == [3_640, 3_640]
    assert in_ns(result, "exposed_comm_s") == [0, 0]


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
