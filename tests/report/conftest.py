"""Runs and recommendations made by hand: every time in them is written out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fleetbench.experiment import Experiment
from fleetbench.plan.build import Setting, build_plan
from fleetbench.plan.layers import Gradient
from fleetbench.result import RunResult, StepRecord, skip, steps_table, summarise
from fleetbench.store import save_run
from fleetbench.strategy import DistributedStrategy
from tuner.notes import Noise, Remark, left_out
from tuner.recommendation import Arm, Pair, Recommendation, TargetCheck

MS = 1_000_000
LOCAL = DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4})
FUSED = DistributedStrategy(fuse_grad_size_in_MB=0.5)

MakeRun = Callable[..., RunResult]


@pytest.fixture
def make_run() -> MakeRun:
    """A run of two ranks: ``backward_ms`` names every step's backward, the rest of a step takes 4 ms.

    Forward 1 ms, stall 2 ms (rank 1 arrives half a millisecond later), update 1 ms.
    """

    def make(
        backward_ms: Sequence[float] = (5, 5, 6, 8),
        *,
        executor: str = "real",
        run_id: str = "a",
        strategy: DistributedStrategy | None = None,
    ) -> RunResult:
        experiment = Experiment(strategy=strategy or DistributedStrategy())
        records = []
        for rank in range(2):
            start = 0
            for step, backward in enumerate(backward_ms, start=1):
                late, backward_ns = rank * MS // 2, round(backward * MS)
                arrival = start + MS + backward_ns + late
                stall = 2 * MS - late
                records.append(
                    StepRecord(
                        rank=rank,
                        step=step,
                        start_ns=start,
                        forward_ns=MS + late,
                        backward_ns=backward_ns,
                        stall_ns=stall,
                        update_ns=MS,
                        end_ns=start + 4 * MS + backward_ns,
                        arrival_ns=arrival,
                        local_steps=1,
                        loss=None,
                        bytes_sent=1000,
                    )
                )
                start += 4 * MS + backward_ns
        table = steps_table(records)
        skipped = [skip("cluster.inter", "launcher local")] if executor == "real" else []
        summary = summarise(experiment, table, executor=executor, run_id=run_id, skipped=skipped)
        gradients = [Gradient(name="b.weight", numel=300_000, ready=1), Gradient(name="a.weight", numel=300_000, ready=2)]
        plan = build_plan(experiment.strategy, gradients, Setting(trainers=2))
        return RunResult(experiment=experiment, summary=summary, steps=table, plan=plan)

    return make


@pytest.fixture
def recommendation() -> Recommendation:
    """USE of 'candidate 2'; 'candidate 1' was fastest and missed the target."""
    return Recommendation(
        experiment="0123abcd",
        name="planted",
        verdict="USE",
        reason="the interval lies above 1.01",
        strategy=FUSED,
        finalist="candidate 2",
        speedup=1.25,
        low=1.2,
        high=1.3,
        pairs=(
            Pair(default_s=0.010, finalist_s=0.008, default_first=True),
            Pair(default_s=0.012, finalist_s=0.0096, default_first=False),
        ),
        arms=(
            Arm(
                name="default",
                strategy=DistributedStrategy(),
                simulated_s=0.009,
                measured_s=(0.010, 0.012, 0.008),
                target=TargetCheck(reached=True, time_s=2.5),
                simulated_run="default-sim",
                measured_runs=("default-1", "default-2"),
            ),
            Arm(
                name="candidate 1",
                strategy=LOCAL,
                simulated_s=0.004,
                measured_s=(0.005,),
                target=TargetCheck(reached=False, final_loss=0.75),
                rejected="misses the target",
            ),
            Arm(
                name="candidate 2",
                strategy=FUSED,
                simulated_s=0.0084,
                measured_s=(0.008, 0.0088),
                measured_runs=("fused",),
            ),
        ),
        num_trials=3,
        noise=Noise(default=0.13, pairs=0.02),
        told=(left_out("use_hierarchical_allreduce", "is not taken", "not executed yet"), Remark(text="profiled at 1 and 2 threads")),
    )


@pytest.fixture
def tuned(tmp_path: Path, make_run: MakeRun, recommendation: Recommendation) -> Path:
    """A tuning's folder with its stored runs."""
    stored = {
        "default-sim": make_run((5, 5), executor="sim"),
        "default-1": make_run((4, 6), run_id="b"),
        "default-2": make_run((6, 8), run_id="c"),
        "fused": make_run((3, 5), run_id="d", strategy=FUSED),
    }
    folder = tmp_path / "tuned"
    for name, run in stored.items():
        saved = save_run(run, folder / "runs")
        assert saved.path is not None
        saved.path.rename(folder / "runs" / name)
    recommendation.save(folder)
    (folder / "experiment.toml").write_text(Experiment().to_toml(), encoding="utf-8")
    return folder
