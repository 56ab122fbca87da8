"""A simulated run against real ones: errors whose every figure is known by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from fleetbench.cluster import Cluster, Link, Measured
from fleetbench.experiment import Experiment, Run
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.build import Setting, build_plan
from fleetbench.plan.layers import Gradient
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.report.fidelity import Figures, compare_fidelity, difference_text, differences_of, step_errors
from fleetbench.result import COLUMNS, RunResult, skip, summarise
from fleetbench.stragglers import SlowRank
from fleetbench.workload import Workload

STEPS = 4
PARTS_MS = {"forward_s": 2.0, "backward_s": 4.0, "wait_s": 1.0, "exposed_comm_s": 1.0, "update_s": 1.0, "other_s": 1.0}
"""A step of 10 ms."""
EXPERIMENT = Experiment(name="two", cluster=Cluster(trainers_per_node=2), workload=Workload(steps=STEPS))
ERRORS_MS = ((1, 2, 3, 4), (-1, -2, -3, -4))
"""Of each rank's backward, step by step."""


def run(
    executor: str = "real",
    backward_ms: Sequence[Sequence[float]] = ((0,) * STEPS,) * 2,
    *,
    run_id: str = "a",
    experiment: Experiment = EXPERIMENT,
    warmup_steps: int = 1,
    **parts_ms: float,
) -> RunResult:
    """Two ranks' steps of 10 ms; ``backward_ms`` and ``parts_ms`` are added, the former to each step of each rank."""
    rows: list[dict[str, Any]] = []
    for rank, added in enumerate(backward_ms):
        start = 0.0
        for step, more in enumerate((*(0,) * warmup_steps, *added), start=1 - warmup_steps):
            parts = {name: value + parts_ms.get(name, 0.0) for name, value in PARTS_MS.items()}
            parts["backward_s"] += more
            filled = {name: value / 1000 for name, value in parts.items()}
            rows.append(dict.fromkeys(COLUMNS) | {"rank": rank, "step": step, "start_s": start} | filled)
            rows[-1] |= {"arrival_s": start, "local_steps": 1, "loss": 0.0, "bytes_sent": 0}
            start += sum(filled.values())
    table = pd.DataFrame(rows)[list(COLUMNS)]
    skipped = [skip("cluster.inter", "launcher local cannot realise it on one machine")] if executor == "real" else []
    summary = summarise(experiment, table, executor=executor, run_id=run_id, skipped=skipped)
    plan = build_plan(experiment.strategy, [Gradient(name="a.weight", numel=300_000, ready=2)], Setting(trainers=2))  # type: ignore[arg-type]  # ns
    return RunResult(experiment=experiment, summary=summary, steps=table, plan=plan)


def fidelity(*runs: RunResult) -> Figures:
    """Of a pair of which one is simulated."""
    found = compare_fidelity(*runs)
    assert found is not None
    return found


def test_errors_of_steps_are_signed_and_have_a_size() -> None:
    """1 to 4 ms too slow on one rank and too fast on the other: no bias, 2.5 ms on average, 4 at most, of 10 ms steps."""
    errors = step_errors(run("sim", ERRORS_MS), run())
    assert errors["step"]["relative"] == pytest.approx({"bias": 0.0, "mean_absolute": 0.25, "p95": 0.4, "max": 0.4})
    assert errors["step"]["error_s"]["mean_absolute"] == pytest.approx(0.0025)


def test_phases_have_their_own_errors() -> None:
    """Half a millisecond too much exposed communication and a quarter too little wait are a quarter too much of both."""
    errors = step_errors(run("sim", ERRORS_MS, exposed_comm_s=0.5, wait_s=-0.25, update_s=-0.1, other_s=0.3), run())
    phases = errors["phases"]
    assert list(phases) == ["compute", "wait", "exposed_comm", "not_compute", "update", "other"]
    assert {name: phase["error_s"]["bias"] for name, phase in phases.items()} == pytest.approx(
        {"compute": 0, "wait": -0.25e-3, "exposed_comm": 0.5e-3, "not_compute": 0.25e-3, "update": -0.1e-3, "other": 0.3e-3}
    )
    assert phases["compute"]["error_s"]["mean_absolute"] == pytest.approx(2.5e-3)
    assert phases["compute"]["predicted_s"] == pytest.approx(6e-3)
    assert phases["wait"]["error_s"]["mean_absolute"] == pytest.approx(0.25e-3)
    json.dumps(errors)


def test_a_run_against_itself_has_no_error() -> None:
    """All figures are zero, of the same run in the other role too."""
    simulated = run("sim", ERRORS_MS)
    errors = step_errors(simulated, simulated)
    zero = {"bias": 0.0, "mean_absolute": 0.0, "p95": 0.0, "max": 0.0}
    assert errors["step"]["relative"] == zero
    assert all(phase["error_s"] == zero for phase in (errors["step"], *errors["phases"].values()))
    twin = dataclasses.replace(simulated, summary=dataclasses.replace(simulated.summary, executor="real"))
    found = fidelity(simulated, twin)
    assert found["differences"] == []
    assert found["errors"]["step"]["relative"] == zero


def test_a_void_run_is_named() -> None:
    """Its steps do not count."""
    void = run()
    void = dataclasses.replace(void, summary=dataclasses.replace(void.summary, testbed={"counts": False}))
    assert any("the real run is void" in note for note in fidelity(run("sim"), void)["notes"])
    assert not any("void" in note for note in fidelity(run("sim"), run())["notes"])


def _changed(**changes: Any) -> Experiment:
    return EXPERIMENT.replace(**changes)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (_changed(workload=Workload(steps=STEPS, batch_size=64)), "workload.batch_size"),
        (_changed(run=Run(seed=7)), "run.seed"),
        (_changed(strategy=EXPERIMENT.strategy.replace(fuse_grad_size_in_MB=1.0)), "strategy.fuse_grad_size_in_MB"),
        (_changed(cluster=Cluster(trainers_per_node=2, stragglers=(SlowRank(ranks=(1,), factor=2.0),))), "cluster.stragglers"),
    ],
)
def test_another_experiment_is_not_compared_step_by_step(other: Experiment, key: str) -> None:
    """What differs is named first, and no error is given."""
    found = fidelity(run("sim", experiment=other), run())
    assert found["errors"] is None
    assert found["differences"][0]["key"] == key
    assert found["differences"][0]["other_steps"]


def test_another_belief_is_said_and_compared() -> None:
    """The simulator may believe another bandwidth than the file of the real run declares."""
    believed = _changed(cluster=Cluster(trainers_per_node=2, intra=Link(bandwidth=BitsPerSecond(10**8))), name="other")
    found = fidelity(run("sim", ERRORS_MS, experiment=believed), run())
    assert {difference["key"] for difference in found["differences"]} == {"cluster.intra.bandwidth", "cluster.intra.latency", "name"}
    assert found["errors"] is not None
    points = tuple(CollectivePoint(nbytes=nbytes, took=Nanoseconds(nbytes)) for nbytes in (10**6, 10**7))
    timed = _changed(cluster=Cluster(trainers_per_node=2, collective="measured", measured=(Measured(trainers=2, points=points),)))
    assert fidelity(run("sim", ERRORS_MS, experiment=timed), run())["errors"] is not None


def test_other_steps_or_ranks_are_not_aligned() -> None:
    """Three steps are not the first three of four; one rank is not one of two. What differs is said."""
    full = run("sim")
    parts = (
        (full.steps["step"] <= 3, ["ranks: 0 to 1 against 0 to 1", "counted steps: 1 to 3 against 1 to 4"]),
        (full.steps["rank"] == 0, ["ranks: 0 to 0 against 0 to 1", "counted steps: 1 to 4 against 1 to 4"]),
        ((full.steps["rank"] == 0) | (full.steps["step"] <= 3), ["ranks: 0 to 1 against 0 to 1", "counted steps: 1 to 4 against 1 to 4"]),
    )
    for part, said in parts:
        found = differences_of(dataclasses.replace(full, steps=full.steps[part]), run())
        assert any(difference["other_steps"] for difference in found)
        texts = [difference_text(difference) for difference in found]
        assert texts == said


def test_it_is_said_when_no_stragglers_were_injected() -> None:
    """None declared; or declared, and left out by the real run."""
    assert any("no stragglers are declared" in note for note in fidelity(run("sim"), run())["notes"])
    declared = _changed(cluster=Cluster(trainers_per_node=2, stragglers=(SlowRank(ranks=(1,), factor=2.0),)))
    simulated, real = run("sim", experiment=declared), run(experiment=declared)
    assert not any("stragglers" in note for note in fidelity(simulated, real)["notes"])
    left_out = dataclasses.replace(real.summary, skipped=(skip("cluster.stragglers", "no layer times"),))
    notes = fidelity(simulated, dataclasses.replace(real, summary=left_out))["notes"]
    assert notes == ["the real run did not realise cluster.stragglers: no layer times"]
