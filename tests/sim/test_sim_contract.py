"""What every executor owes: recorded decisions that replay, refusals by name, the same bytes for the same file."""

from __future__ import annotations

import dataclasses
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sim_cases import layered, link, profiled, with_profile

from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.plan.events import Observed
from fleetbench.plan.operations import COLLECTIVES
from fleetbench.plan.training import family
from fleetbench.stragglers import Jitter
from fleetbench.workload import LossCurve
from sim.run import simulate

LAYERS = [(250, 10_000, 20_000), (500, 30_000, 40_000), (10, 0, 10)]


HIERARCHY = {"use_hierarchical_allreduce": True}
LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 3}}
FAMILIES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "communicators": {"nccl_comm_num": 2, "sync_nccl_allreduce": False},
    "leaders": HIERARCHY,
    "reduce-scatter": HIERARCHY | {"hierarchical_variant": "reduce_scatter", "nccl_comm_num": 2, "sync_nccl_allreduce": False},
    "wire type": {"bf16_allreduce": True, "find_unused_parameters": True},
    "merged gradient": {"fuse_all_reduce_ops": True, "fusion": "merged_gradient"},
    "optimal fusion": {"fuse_all_reduce_ops": True, "fusion": "optimal"},
    "update by bucket": {"build_strategy": {"enable_backward_optimizer_op_deps": False}},
    "sequential": {"build_strategy": {"enable_sequential_execution": True}},
    "mixed precision": {"amp": True},
    "gradient merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "batch_norm_per": "update"}},
    "remainder flushed": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "remainder": "flush", "avg": False}},
    "remainder dropped": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "remainder": "drop"}, "amp": True},
    "local": LOCAL,
    "local, document": {"localsgd": True, "localsgd_configs": {"schedule": "document", "k_steps": 4, "warmup_epochs": 1}},
    "local, torch": {"localsgd": True, "localsgd_configs": {"schedule": "torch", "k_steps": 2, "begin_step": 3}},
    "local, averaging all": {"localsgd": True, "localsgd_configs": {"k_steps": 2, "momentum": "average", "buffers": "average"}},
    "local, reset": {"localsgd": True, "localsgd_configs": {"k_steps": 2, "momentum": "reset"}} | HIERARCHY,
    "local, merged, scaled": LOCAL | {"amp": True, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    **{
        f"adaptive, {variant}": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"variant": variant, "init_k_steps": 2}}
        for variant in ("fleet", "paper", "document", "qsr")
    },
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_recordings_replay_to_the_recorded_operations(name: str) -> None:
    """Every rank's events, fed to a fresh state, give its operations; all ranks decided the same; parts of steps add up."""
    experiment, profile = profiled(
        [([250, 70], [10_000, 60_000], 10_000, 20_000), ([500], [20_000], 30_000, 40_000)],
        {
            "read": 11,
            "update": 1_000,
            "merge": 500,
            "buffers_nbytes": 40,
            "averaged_nbytes": 24,
            "contention": 0.25,
            "host_per_collective": 100,
        },
        nodes=2,
        trainers_per_node=2,
        intra=link(80, 10),
        inter=link(8, 100),
        stragglers=(Jitter(mean=0.5),),
        strategy=FAMILIES[name],
        also={"loss_curve": LossCurve(start=3.0, floor=0.7, half_life=4.0), "steps_per_epoch": 5, "optimizer": "momentum"},
        steps=13,
        warmup_steps=2,
    )
    result = simulate(with_profile(experiment, profile), record=True)
    assert [recording.rank for recording in result.recordings] == [0, 1, 2, 3]
    decided = []
    for recording in result.recordings:
        fresh = family(experiment.strategy, result.plan)
        recorded = [operations for _, _, operations in recording.log]
        assert recording.replayed(fresh) == recorded
        decided.append(recorded)
    assert all(recorded == decided[0] for recorded in decided)
    assert any(operation.kind in COLLECTIVES for operations in decided[0] for operation in operations)
    names = [type(event).__name__ for _, event, _ in result.recordings[0].log if not isinstance(event, Observed)]
    buckets = ["BucketReady"] * len(result.plan.buckets)
    step = ["StepBegin", *buckets, "BackwardEnd"]
    assert names == step * 7 + ["EpochEnd"] + step * 5 + ["EpochEnd"] + step * 3 + ["DataEnd"]
    parts = ["forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s"]
    assert (result.steps[parts] >= 0).all(axis=None)
    assert result.steps["other_s"].to_numpy() == pytest.approx([11e-9] * len(result.steps), abs=1e-12)
    for _, own in result.steps.groupby("rank"):
        assert own[parts].sum(axis=1).to_numpy()[:-1] == pytest.approx(own["start_s"].diff().dropna().to_numpy(), abs=1e-12)
    assert simulate(with_profile(experiment, profile)).recordings == ()


def changed(part: str, **changes: object) -> tuple[str, dict[str, object]]:
    """A change of one part of an experiment."""
    return part, changes


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (changed("strategy", auto=True), "strategy.auto"),
        (changed("cluster", servers=1), "cluster.servers"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(change: tuple[str, dict[str, object]], name: str) -> None:
    """A changed field that the simulator does not execute is an error that names it; unchanged, the run works."""
    experiment = layered(LAYERS, nodes=2, trainers_per_node=2, intra=link(8), inter=link(8))
    simulate(experiment)
    part, changes = change
    value = getattr(experiment, part)
    value = value.replace(**changes) if part == "strategy" else dataclasses.replace(value, **changes)
    with pytest.raises(ConfigError, match=name):
        simulate(experiment.replace(**{part: value}))


def test_a_run_that_takes_no_time_is_refused() -> None:
    """Layers of 0 ns on one trainer leave nothing to divide samples by."""
    with pytest.raises(ConfigError, match="takes no time"):
        simulate(layered([(250, 0, 0)], nodes=1))
    assert simulate(layered([(250, 0, 0)], inter=link(8))).summary.wall_s == pytest.approx(1000e-9)


def test_every_field_is_executed_or_refused() -> None:
    """A field that is added to a part of the experiment is refused until the simulator says otherwise."""
    from fleetbench.cluster import Cluster
    from fleetbench.config import field_types
    from fleetbench.experiment import Run
    from fleetbench.plan.training import PLANNED
    from fleetbench.profile import COMPUTE_ONLY
    from fleetbench.support import RUN, WORKLOAD
    from fleetbench.workload import Workload
    from sim.scenario import CLUSTER, LOSSES

    parts: dict[str, tuple[type[Config], frozenset[str]]] = {
        "cluster": (Cluster, CLUSTER),
        "run": (Run, RUN),
        "workload": (Workload, WORKLOAD),
    }
    for part, (kind, executed) in parts.items():
        assert executed <= {f"{part}.{name}" for name in field_types(kind)}
    assert {f"workload.{name}" for name in field_types(Workload)} == WORKLOAD | LOSSES
    assert set(COMPUTE_ONLY) <= PLANNED
    assert {name for name in field_types(Cluster) if f"cluster.{name}" not in CLUSTER} == {
        "servers",
        "server_placement",
    }
    assert "strategy.mode" not in PLANNED
    assert "strategy.auto" not in PLANNED


def test_what_a_simulated_run_leaves_out_is_listed() -> None:
    """A target without simulated losses, threads of declared layers, cores and environment stand in ``skipped``."""
    experiment, profile = profiled([([100], [200], 100, 200)], {}, inter=link(8))
    experiment = experiment.replace(workload=dataclasses.replace(experiment.workload, target_loss=0.3))
    summary = simulate(with_profile(experiment, profile)).summary
    assert [entry["what"] for entry in summary.skipped] == ["workload.target_loss"]
    assert summary.final_loss is None
    assert summary.time_to_target_s is None
    experiment = layered(LAYERS, inter=link(8), strategy={"thread_num": 2})
    experiment = experiment.replace(
        cluster=dataclasses.replace(experiment.cluster, cores_per_node=4),
        run=dataclasses.replace(experiment.run, environment={"OMP_NUM_THREADS": "1"}),
    )
    summary = simulate(experiment).summary
    assert [entry["what"] for entry in summary.skipped] == ["strategy.thread_num", "cluster.cores_per_node", "run.environment"]
    assert simulate(layered(LAYERS, inter=link(8))).summary.skipped == ()


SCRIPT = """
import hashlib, sys
from pathlib import Path
from fleetbench.experiment import Experiment
from fleetbench.store import save_run
from sim.run import simulate

path = save_run(simulate(Experiment.load(sys.argv[1])), sys.argv[2]).path
for name in ("steps.parquet", "summary.json", "timeline.json.gz", "plan.json"):
    content = (path / name).read_bytes()
    if name == "summary.json":
        content = b"".join(line for line in content.splitlines() if b"run_id" not in line)
    print(name, hashlib.sha256(content).hexdigest())
"""


@pytest.mark.slow
def test_the_same_file_gives_the_same_bytes_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps, summary (but its run id), timeline and plan do not depend on the process or its hash seed; the seed changes them."""
    several = HIERARCHY | {"hierarchical_variant": "reduce_scatter", "nccl_comm_num": 3, "sync_nccl_allreduce": False}
    jitter = (Jitter(mean=0.5), Jitter(distribution="exponential", mean=0.1))
    cluster = {"trainers_per_node": 2, "intra": link(80, 10), "inter": link(8, 100)}
    experiment = layered(LAYERS, **cluster, stragglers=jitter, strategy=several, steps=30, warmup_steps=2)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    lines = []
    for seed in (0, 1):
        file = tmp_path / f"{seed}.toml"
        file.write_text(experiment.replace(run=dataclasses.replace(experiment.run, seed=seed)).to_toml(), encoding="utf-8")
        lines.append([str(tmp_path / "script.py"), str(file), str(tmp_path / "runs")])
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    there = subprocess.run([sys.executable, *lines[0]], env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    here = []
    for line in lines:
        monkeypatch.setattr(sys, "argv", line)
        runpy.run_path(line[0], run_name="__main__")
        here.append(capsys.readouterr().out.splitlines())
    assert len(there) == 4
    assert there == here[0]
    assert all(one != other for one, other in zip(there[:3], here[1][:3], strict=True))
