from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, Run
from fleetbench.plan.build import Setting, build_plan
from fleetbench.plan.events import BackwardEnd, BucketReady, StepBegin
from fleetbench.plan.layers import Gradient
from fleetbench.plan.replay import Decider
from fleetbench.plan.training import family
from fleetbench.quantities import Nanoseconds
from fleetbench.result import COLUMNS, RunResult, StepRecord, Summary, skip, steps_table, summarise
from fleetbench.store import load_run, load_runs, save_run
from fleetbench.strategy import DistributedStrategy
from fleetbench.timeline import COMMUNICATION, COMPUTE, Span, on_tracks, read_timeline, write_timeline
from fleetbench.workload import Workload

PUBLISHED_KEYS = [  # by hand, from the documented example of summary.json
    "schema",
    "executor",
    "name",
    "experiment",
    "run_id",
    "device",
    "emulated",
    "launcher",
    "seed",
    "trainers",
    "servers",
    "steps",
    "wall_s",
    "samples_per_s",
    "step_s",
    "compute_s",
    "wait_s",
    "exposed_comm_s",
    "update_s",
    "other_s",
    "bytes_sent_per_trainer",
    "num_syncs",
    "local_steps",
    "staleness",
    "final_loss",
    "time_to_target_s",
    "steps_to_target",
    "metrics",
    "skipped",
    "lateness_s",
    "testbed",
    "engine",
    "server_load",
    "per_trainer",
    "foreign_cores",
    "loss_from",
    "churn",
]


def record(rank: int, step: int = 1, **fields: Any) -> StepRecord:
    """A step of 100 ns with a collective, unless said otherwise."""
    base: dict[str, Any] = {
        "start_ns": 0,
        "forward_ns": 30,
        "backward_ns": 50,
        "stall_ns": 0,
        "update_ns": 10,
        "end_ns": 100,
        "arrival_ns": None,
        "local_steps": 1,
        "loss": 0.5,
        "bytes_sent": 1000,
    }
    return StepRecord(rank=rank, step=step, **{**base, **fields})


THREE_RANKS = [  # one all-reduce of 20 ns that starts when the last rank arrives, at 120 ns
    record(0, forward_ns=30, backward_ns=50, arrival_ns=80, stall_ns=60, update_ns=10, end_ns=160),
    record(1, forward_ns=40, backward_ns=60, arrival_ns=100, stall_ns=40, update_ns=10, end_ns=160),
    record(2, forward_ns=50, backward_ns=70, arrival_ns=120, stall_ns=20, update_ns=10, end_ns=160),
]


def test_a_stall_is_waiting_for_the_slowest_and_then_communication() -> None:
    """Three ranks ready at 80, 100 and 120 ns wait 40, 20 and 0 ns, and see 20 ns of the all-reduce each."""
    table = steps_table(THREE_RANKS)
    assert tuple(table.columns) == COLUMNS
    assert table["wait_s"].tolist() == [40e-9, 20e-9, 0.0]
    assert table["exposed_comm_s"].tolist() == [20e-9] * 3
    assert table["other_s"].tolist() == [10e-9, 10e-9, 10e-9]
    assert table["arrival_s"].tolist() == [80e-9, 100e-9, 120e-9]


def test_waiting_before_the_stall_is_not_waiting() -> None:
    """A bucket that is ready before the backward ends hides behind it: only what is left after the backward counts.

    Rank 0 arrives at 40 and computes until 80; rank 1 arrives at 90; the all-reduce ends at 95.
    """
    early = record(0, forward_ns=30, backward_ns=50, arrival_ns=40, stall_ns=15, update_ns=5, end_ns=100)
    late = record(1, forward_ns=30, backward_ns=60, arrival_ns=90, stall_ns=5, update_ns=5, end_ns=100)
    table = steps_table([late, early])
    assert table["rank"].tolist() == [0, 1]
    assert table["wait_s"].tolist() == [10e-9, 0.0]
    assert table["exposed_comm_s"].tolist() == [5e-9, 5e-9]


def test_a_step_without_a_collective_waits_for_nobody() -> None:
    """Inside a Local SGD round there is no arrival, no wait and no round's length."""
    table = steps_table([record(0, local_steps=None), record(1, local_steps=None)])
    assert table["wait_s"].tolist() == [0.0, 0.0]
    assert table["arrival_s"].isna().all()
    assert table["local_steps"].isna().all()


def test_the_parts_of_a_step_add_up_to_it() -> None:
    """The six parts of every row are the time from its start to the next step's."""
    table = steps_table(THREE_RANKS)
    parts = table[["forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s"]].sum(axis=1)
    np.testing.assert_allclose(parts, 160e-9, rtol=1e-12)


def experiment(**changes: Any) -> Experiment:
    """Three trainers on one node."""
    return Experiment(name="three", cluster=Cluster(trainers_per_node=3), workload=Workload(batch_size=8), **changes)


def summary(**outcome: Any) -> Summary:
    """The summary of a warm-up step and two counted ones: two trainers' rounds of one and two steps."""
    rows = [dataclasses.replace(row, step=0, start_ns=-160, end_ns=0, arrival_ns=-40, bytes_sent=7) for row in THREE_RANKS]
    rows += THREE_RANKS
    rows += [
        record(rank, 2, start_ns=160, end_ns=360, forward_ns=90, backward_ns=90, update_ns=20, local_steps=2, loss=0.25)
        for rank in range(3)
    ]
    return summarise(experiment(), steps_table(rows), executor="sim", run_id="r", **outcome)


def test_the_summary_has_the_published_keys_in_their_order() -> None:
    """``--json`` prints exactly these keys, and the nested ones."""
    data = json.loads(summary(skipped=[skip("cluster.inter", "launcher local")]).to_json())
    assert list(data) == PUBLISHED_KEYS
    assert list(data["step_s"]) == ["mean", "p50", "p95", "p99"]
    assert list(data["local_steps"]) == ["mean", "min", "max"]
    assert data["skipped"] == [{"what": "cluster.inter", "why": "launcher local"}]
    assert data["schema"] == 1


def test_the_summary_counts_steps_from_one() -> None:
    """By hand: steps of 160 and 200 ns on three trainers; the warm-up step counts nowhere."""
    s = summary()
    assert (s.steps, s.trainers, s.num_syncs) == (2, 3, 2)
    assert s.wall_s == pytest.approx(360e-9)
    assert s.samples_per_s == pytest.approx(3 * 2 * 8 / 360e-9)
    assert s.step_s["mean"] == pytest.approx(180e-9)
    assert s.step_s["p50"] == pytest.approx(180e-9)
    assert s.compute_s == pytest.approx(((80 + 100 + 120) / 3 + 180) / 2 * 1e-9)
    assert s.wait_s == pytest.approx(20e-9 / 2)
    assert s.exposed_comm_s == pytest.approx(20e-9 / 2)
    assert s.update_s == pytest.approx(15e-9)
    assert s.compute_s + s.wait_s + s.exposed_comm_s + s.update_s + s.other_s == pytest.approx(s.step_s["mean"])
    assert s.bytes_sent_per_trainer == 2000
    assert s.local_steps == {"mean": 1.5, "min": 1, "max": 2}


def result() -> RunResult:
    """A small run with everything that a run can hold."""
    gradients = [Gradient(name="b.weight", numel=4, ready=Nanoseconds(1)), Gradient(name="a.weight", numel=4, ready=Nanoseconds(2))]
    plan = build_plan(experiment().strategy, gradients, Setting(trainers=3))
    decider = Decider.start(family(experiment().strategy, plan), 0, record=True)
    for now, event in enumerate((StepBegin(1), BucketReady(0), BackwardEnd())):
        decider.on(now, event)
    return RunResult(
        experiment=experiment(),
        summary=summary(),
        steps=steps_table([*THREE_RANKS, record(0, 2, local_steps=None, loss=None)]),
        plan=plan,
        spans=SPANS,
        recordings=(decider.recording(),),
        host_s=1.5,
    )


SPANS = (
    Span(0, COMMUNICATION, "all_reduce 0", 80_001, 40_003),
    Span(0, COMPUTE, "forward", 0, 30_000),
    Span(1, COMPUTE, "backward", 1, 10**15 + 1),
)


def test_a_stored_run_loads_as_itself(tmp_path: Path) -> None:
    """Experiment, summary, table and plan survive; nothing else lies in the folder."""
    run = result()
    stored = save_run(run, tmp_path / "runs")
    assert stored.path is not None
    assert stored.path.name == f"three-sim-{run.experiment.digest()}-r"
    loaded = load_run(stored.path)
    assert loaded.steps.equals(run.steps)
    assert (loaded.steps.dtypes == run.steps.dtypes).all()
    for name in ("experiment", "summary", "plan", "host_s"):
        assert getattr(loaded, name) == getattr(run, name), name
    names = {path.name for path in stored.path.iterdir()}
    assert names == {"experiment.toml", "plan.json", "steps.parquet", "summary.json", "timeline.json.gz", "manifest.json"}


def test_runs_load_as_one_table_with_the_settings_that_differ(tmp_path: Path) -> None:
    """A row a complete run, by its folder: its summary's figures, and of the settings those alone in which the runs differ."""
    first = result()
    other = dataclasses.replace(first, experiment=experiment(strategy=DistributedStrategy(fuse_grad_size_in_MB=2)))
    paths = [save_run(run, tmp_path).path for run in (first, other)]
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "manifest.json").write_text("{}")
    (tmp_path / "interrupted").mkdir()
    (tmp_path / "interrupted" / "summary.json").write_text("{}")
    table = load_runs(f"{tmp_path}/*")
    assert sorted(table.index) == sorted(path.name for path in paths if path is not None)
    assert table["step_s.mean"].tolist() == [first.summary.step_s["mean"]] * 2
    assert [name for name in table if name.startswith(("workload.", "cluster.", "strategy.", "run.", "tune."))] == [
        "strategy.fuse_grad_size_in_MB"
    ]
    assert sorted(table["strategy.fuse_grad_size_in_MB"]) == [2, 32]
    assert "staleness" not in table, "what no run has is left out"
    assert "skipped" not in table
    with pytest.raises(ConfigError, match="no complete run matches"):
        load_runs(f"{tmp_path}/none-*")


def test_the_manifest_says_what_the_run_depended_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that the workers got: this process's allowed variables, and over them the experiment's; and the versions."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    run = dataclasses.replace(result(), experiment=experiment(run=Run(environment={"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO"})))
    path = save_run(run, tmp_path).path
    assert path is not None
    manifest = json.loads((path / "manifest.json").read_text())
    assert {name: manifest["environment"].get(name) for name in ("OMP_NUM_THREADS", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME")} == {
        "OMP_NUM_THREADS": "2",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert "SECRET_TOKEN" not in manifest["environment"]
    assert {"python", "numpy", "pandas", "pyarrow", "scikit-learn", "scipy", "simpy", "torch"} <= manifest["versions"].keys()


def test_collectives_that_overlap_are_drawn_apart(tmp_path: Path) -> None:
    """Three on one communicator, two at a time: two rows, the third on the one that is free; a wait within the backward shares a row."""
    times = {"all_reduce 0": (0, 50), "all_reduce 1": (10, 20), "all_reduce 2": (30, 40)}
    spans = [Span(0, COMMUNICATION, name, start, length) for name, (start, length) in times.items()]
    within = [Span(0, COMPUTE, "backward", 0, 40), Span(0, COMPUTE, "wait", 10, 5)]
    assert [(track, span.name) for track, span in on_tracks([*spans[::-1], *within])] == [
        ((0, COMMUNICATION, 0), "all_reduce 0"),
        ((0, COMMUNICATION, 1), "all_reduce 1"),
        ((0, COMMUNICATION, 1), "all_reduce 2"),
        ((0, COMPUTE, 0), "backward"),
        ((0, COMPUTE, 0), "wait"),
    ]
    write_timeline(tmp_path / "timeline.json.gz", [*spans, *within])
    assert set(read_timeline(tmp_path / "timeline.json.gz")) == {*spans, *within}


@pytest.mark.parametrize("fields", [{"end_ns": 2**63}, {"bytes_sent": 2**63}])
def test_what_64_bits_do_not_count_is_refused(fields: dict[str, int]) -> None:
    """A link of a bit a second makes a run of centuries: an error with a hint, no table of rounded numbers."""
    assert len(steps_table([record(0, **{name: value - 1 for name, value in fields.items()})])) == 1
    with pytest.raises(ConfigError, match="cannot be counted in 64 bits"):
        steps_table([record(0, **fields)])
