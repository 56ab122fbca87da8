"""What ranks wrote of a script's leg, as a run: evaluations cut out, clocks laid over each other."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbench.experiment import Experiment
from fleetbench.plan.build import Setting, build_plan
from fleetbench.plan.layers import Gradient
from fleetbench.quantities import Nanoseconds
from fleetbench.result import PARTS, RunResult
from fleetbench.strategy import DistributedStrategy
from real.job.results import run_of
from real.leg import Leg

MS = 1_000_000
STEP = 10 * MS
PLAN = build_plan(DistributedStrategy(), [Gradient(name="a.weight", numel=10, ready=Nanoseconds(1))], Setting(trainers=2)).to_dict()


def step(number: int, start: int, *, stall: int = 2 * MS, tail: int = 0, begin: int = 0) -> dict[str, Any]:
    """A step of 10 ms: forward 3, backward 4, ``stall``, update 1; ``tail`` more until the next begins; its clock begins at ``begin``."""
    compute_end = start + 7 * MS
    return {
        "record": {
            "rank": 0,
            "step": number,
            "start_ns": begin + start,
            "forward_ns": 3 * MS,
            "backward_ns": 4 * MS,
            "stall_ns": stall,
            "update_ns": MS,
            "end_ns": begin + compute_end + stall + MS + tail,
            "arrival_ns": begin + compute_end,
            "local_steps": 1,
            "loss": None,
            "bytes_sent": 0,
        },
        "paused_ns": 0,
    }


def part(rank: int, steps: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    """A rank's part."""
    for entry in steps:
        entry["record"]["rank"] = rank
    spans = [
        {
            "step": entry["record"]["step"],
            "name": "forward",
            "start_ns": entry["record"]["start_ns"],
            "end_ns": entry["record"]["start_ns"] + 3 * MS,
        }
        for entry in steps
    ]
    found = {"steps": steps, "spans": spans, "plan": PLAN, "recordings": [], "evaluated": [], "peak_bytes": rank}
    return found | more


def run(*parts: dict[str, Any]) -> RunResult:
    """The run of a leg of ten steps."""
    return run_of(Experiment.from_dict({"cluster": {"trainers_per_node": 2}}), Leg(steps=10, warmup_steps=0), parts)


def even(numbers: range, begin: int = 0) -> list[dict[str, Any]]:
    """Steps one after the other, 10 ms each."""
    return [step(number, (number - 1) * STEP, begin=begin) for number in numbers]


def test_an_evaluation_is_no_part_of_a_step() -> None:
    """Rank 0 evaluates for 500 ms after step 4, and rank 1 waits for it in step 5: both steps are left out, the others are as ever."""
    pause = 500 * MS
    first = even(range(1, 4)) + [step(4, 3 * STEP, tail=pause)] + [step(number, (number - 1) * STEP + pause) for number in range(5, 11)]
    second = (
        even(range(1, 5))
        + [step(5, 4 * STEP, stall=2 * MS + pause)]
        + [step(number, (number - 1) * STEP + pause) for number in range(6, 11)]
    )
    found = run(part(0, first, evaluated=[4]), part(1, second))
    assert sorted(found.steps["step"].unique()) == [1, 2, 3, 6, 7, 8, 9, 10]
    assert found.summary.steps == found.experiment.workload.steps == 8
    assert found.summary.wall_s == pytest.approx(0.08)
    assert found.summary.wait_s == pytest.approx(0.0)
    starts = found.steps[found.steps["rank"] == 1].set_index("step")["start_s"]
    assert starts[6] - starts[3] == pytest.approx(0.01)
    assert {span.start_ns for span in found.spans if span.rank == 1} == {round(start * 1e9) for start in starts}
    undisturbed = run(part(0, first), part(1, second))
    assert undisturbed.summary.wall_s > 0.5


def test_no_rank_begins_a_step_before_its_last_one_ended() -> None:
    """Rank 1 comes 3 ms later to the steps that are left out, and leaves them with rank 0: the gap that both have is closed."""
    pause, late = 500 * MS, 3 * MS
    rest = [step(number, (number - 1) * STEP + pause) for number in range(6, 11)]
    first = [*even(range(1, 4)), step(4, 3 * STEP, tail=pause), step(5, 4 * STEP + pause), *rest]
    second = [
        *even(range(1, 3)),
        step(3, 2 * STEP, tail=late),
        step(4, 3 * STEP + late),
        step(5, 4 * STEP + late, stall=2 * MS + pause - late),
    ]
    table = run(part(0, first, evaluated=[4]), part(1, [*second, *[dict(entry, record=dict(entry["record"])) for entry in rest]])).steps
    ends = table["start_s"] + table[list(PARTS)].sum(axis=1)
    for rank, last_s, next_s in ((0, 0.03, 0.033), (1, 0.033, 0.033)):
        own = table["rank"] == rank
        assert ends[own & (table["step"] == 3)].item() == pytest.approx(last_s)
        assert table.loc[own & (table["step"] == 6), "start_s"].item() == pytest.approx(next_s)


def test_under_local_steps_an_evaluation_ends_with_the_next_averaging() -> None:
    """Ranks meet in every fourth step; rank 0 evaluates after step 5, for which rank 1 waits in step 8: 5 to 8 are left out."""
    pause = 500 * MS
    first = even(range(1, 5)) + [step(5, 4 * STEP, tail=pause)] + [step(number, (number - 1) * STEP + pause) for number in range(6, 13)]
    second = (
        even(range(1, 8))
        + [step(8, 7 * STEP, stall=2 * MS + pause)]
        + [step(number, (number - 1) * STEP + pause) for number in range(9, 13)]
    )
    for entry in (*first, *second):
        if entry["record"]["step"] % 4:
            entry["record"]["arrival_ns"] = None
    found = run(part(0, first, evaluated=[5]), part(1, second))
    assert sorted(found.steps["step"].unique()) == [1, 2, 3, 4, 9, 10, 11, 12]
    assert found.summary.wall_s == pytest.approx(0.08)
    for rank in range(2):
        starts = found.steps[found.steps["rank"] == rank].set_index("step")["start_s"]
        assert starts[9] - starts[4] == pytest.approx(0.01)
    behind_the_last = run(part(0, first[:11], evaluated=[9]), part(1, second[:11]))
    assert sorted(behind_the_last.steps["step"].unique()) == list(range(1, 9))


def test_a_clock_that_drifts_within_a_leg_is_followed() -> None:
    """One that gains 1 ms a step shows steps that begin ever later; compared at both ends of the leg, they begin together."""
    begins = [(number - 1) * STEP for number in range(1, 11)]

    def found(**more: object) -> list[int]:
        steps = [step(number, (number - 1) * (STEP + MS)) for number in range(1, 11)]
        table = run(part(0, even(range(1, 11))), part(1, steps, **more)).steps
        return [round(begin * 1e9) for begin in table.loc[table["rank"] == 1, "start_s"]]

    assert found()[-1] == begins[-1] + 9 * MS
    assert found(clock_offsets_ns=[[0, 0]])[-1] == begins[-1] + 9 * MS
    assert found(clock_offsets_ns=[[0, 0], [110 * MS, 10 * MS]]) == begins


def test_legs_of_a_profile_take_local_steps_with_any_optimizer() -> None:
    """Local SGD with Adam is no experiment, and its time is measured all the same."""
    adam = Experiment.from_dict({"cluster": {"trainers_per_node": 2}, "workload": {"optimizer": "adam"}})
    local = DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": 2})
    found = run_of(adam, Leg(strategy=local, steps=10, warmup_steps=0), [part(0, even(range(1, 11))), part(1, even(range(1, 11)))])
    assert found.experiment.strategy == local


def test_a_target_is_looked_for_in_what_evaluations_leave() -> None:
    """After every fourth step the script evaluates, and reports a loss of 1 / step: windows of four steps have two or three, and count.

    All three means are below 1, so the first window is the hit: three of its steps take 30 ms, and the one cut out counts as they do.
    """
    ranks = []
    for rank in range(2):
        steps = even(range(1, 13))
        for number, entry in enumerate(steps, start=1):
            entry["record"]["loss"] = 1 / number
        reported = [[step, float(step + rank)] for step in range(2, 7)]  # of the window that is the hit, steps 2 to 4
        ranks.append({**part(rank, steps, evaluated=[4, 8, 12]), "metrics": {"acc": [[-1, 9.0], *reported], "later": [[5, 1.0]]}})
    experiment = Experiment.from_dict({"cluster": {"trainers_per_node": 2}, "workload": {"target_loss": 1.0, "eval_every": 4}})
    found = run_of(experiment, Leg(steps=12, warmup_steps=0, start="initial", evaluate=True), ranks).summary
    assert found.final_loss == pytest.approx((1 / 10 + 1 / 11) / 2)
    assert found.time_to_target_s == pytest.approx(0.04)
    assert found.metrics == {"acc": 3.5}
