"""Emulated compute on real processes: times by the table, and everything else by the strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from sim_cases import with_profile

from fleetbench.cli.main import main
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.plan.training import family
from fleetbench.profile import Profile, compute_key, table_for
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.report.model import read_report
from fleetbench.result import RunResult
from fleetbench.store import load_run
from fleetbench.stragglers import draws, stretch
from fleetbench.strategy import DistributedStrategy
from real.job.session import Session
from real.leg import Leg
from real.training import checksum
from sim.run import simulate

pytestmark = pytest.mark.alone
STEPS, WARMUP = 8, 2
LATE_S = 0.008
"""Four trainers share two cores with whatever else runs: so late may the median step be."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "a bucket a gradient": {"fuse_all_reduce_ops": False},
    "soft caps": {"fuse_grad_size_in_MB": 0.002},
    "merged gradient": {"fusion": "merged_gradient"},
    "optimal fusion": {"fusion": "optimal"},
    "free": {"fuse_all_reduce_ops": False, "sync_nccl_allreduce": False},
    "two communicators": {"fuse_all_reduce_ops": False, "nccl_comm_num": 2, "sync_nccl_allreduce": False},
    "leaders": {"use_hierarchical_allreduce": True, "fuse_grad_size_in_MB": 0.002},
    "reduce-scatter": {"use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter", "fuse_grad_size_in_MB": 0.002},
    "merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "bucket updates": {"fuse_all_reduce_ops": False, "build_strategy": {"enable_backward_optimizer_op_deps": False}},
    "sequential": {"fuse_all_reduce_ops": False, "build_strategy": {"enable_sequential_execution": True}},
    "local": {"localsgd": True, "localsgd_configs": {"k_steps": 4, "momentum": "average", "buffers": "average"}},
    "adaptive": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2}},
}
UPDATES = {"merge": (STEPS + WARMUP) // 2}


def _layer(name: str, gradients: list[tuple[str, int, float]], forward_ms: float, backward_ms: float) -> Layer:
    return Layer(
        name=name,
        gradients=tuple(
            Gradient(name=f"{name}.{leaf}", numel=numel, ready=Nanoseconds(round(ready * 1e6))) for leaf, numel, ready in gradients
        ),
        forward=Nanoseconds(round(forward_ms * 1e6)),
        backward=Nanoseconds(round(backward_ms * 1e6)),
    )


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    """Two nodes of two trainers, with stragglers; the momentum's state travels where strategies average it."""
    link = {"bandwidth": "1 Gbit/s", "latency": "50 us"}
    return Experiment.from_dict(
        {
            "name": "emulated",
            "workload": {
                "model": "mlp",
                "steps": STEPS,
                "optimizer": "momentum",
                "lr": 0.5,
                "target_loss": 1.5,
                "eval_every": 1,
                "loss_curve": {"start": 2.0, "floor": 1.0, "half_life": "4 steps"},
            },
            "cluster": {
                "nodes": 2,
                "trainers_per_node": 2,
                "intra": link,
                "inter": link,
                "stragglers": [{"kind": "jitter", "mean": 0.3}, {"kind": "slow_rank", "ranks": [3], "factor": 1.5}],
            },
            "strategy": {"fuse_grad_size_in_MB": 0.002, "thread_num": 1},
            "run": {"device": "emulated", "warmup_steps": WARMUP, "seed": 3},
        }
    )


@pytest.fixture(scope="module")
def profile(experiment: Experiment) -> Profile:
    """Three layers, whose gradients come neither in the forward's order nor against it: 5 + 10 ms, an update of 3 ms, a batch in 2 ms."""
    table = LayerTable(
        key="of every strategy",
        layers=(
            _layer("stem", [("weight", 700, 9), ("bias", 30, 8.5)], 2, 1),
            _layer("body.0", [("weight", 500, 5), ("bias", 40, 9.5)], 1, 4),
            _layer("head", [("weight", 900, 4), ("bias", 50, 2)], 2, 5),
        ),
        update=Nanoseconds(3_000_000),
        read=Nanoseconds(2_000_000),
        buffers_nbytes=Bytes(80),
        averaged_nbytes=Bytes(56),
    )
    keys = {compute_key(experiment, DistributedStrategy.from_dict(fields)) for fields in STRATEGIES.values()}
    tables = tuple(dataclasses.replace(table, key=key) for key in sorted(keys))
    return Profile(machine="by hand", created="2026-01-01", tables=tables)


@pytest.fixture(scope="module")
def session(experiment: Experiment, profile: Profile) -> Iterator[Session]:
    """One launch for all tests of this module."""
    with Session(with_profile(experiment, profile)) as launched:
        yield launched


def _parameters(table: LayerTable, num_updates: int, shards: int = 1) -> str:
    """The checksum of parameters that have moved by lr = 1/2 times the mean gradient of four ranks, which is 2.5 (place mod 7 + 1).

    The first element of each shard has moved.
    """
    place = {gradient.name: position for position, gradient in enumerate(table.by_readiness())}
    values = []
    for layer in table.layers:
        for gradient in layer.gradients:
            value = torch.zeros(gradient.numel)
            value[:: -(-gradient.numel // shards)] = -0.5 * num_updates * 2.5 * (place[gradient.name] + 1)
            values.append(value)
    model = torch.nn.Module()
    for number, value in enumerate(values):
        model.register_parameter(str(number), torch.nn.Parameter(value))
    return checksum(model)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_plan_bytes_rounds_and_averages_are_the_real_ones(name: str, session: Session, experiment: Experiment, profile: Profile) -> None:
    """The simulator's plan, bytes, rounds and declared losses, step by step; operations that replay; and parameters by closed form."""
    strategy = DistributedStrategy.from_dict(STRATEGIES[name])
    leg = Leg(strategy=strategy, steps=STEPS, warmup_steps=WARMUP, start="initial", evaluate=True, record=True)
    seen: list[dict[str, Any]] = []
    run = session._run
    session._run = lambda *arguments: seen.extend(run(*arguments)) or seen  # type: ignore[method-assign, func-returns-value]  # to look at what ranks wrote
    try:
        real = session.run(leg)
    finally:
        session._run = run  # type: ignore[method-assign]  # see above
    changed = experiment.replace(strategy=strategy)
    simulated = simulate(with_profile(changed, profile), record=True)
    assert real.plan.digest == simulated.plan.digest
    for column in ("step", "rank", "bytes_sent", "local_steps", "loss"):
        assert real.steps[column].astype(object).tolist() == simulated.steps[column].astype(object).tolist(), column
    assert (real.summary.final_loss, real.summary.emulated) == (simulated.summary.final_loss, True)
    for recording in real.recordings:
        assert recording.replayed(family(strategy, real.plan)) == [operations for _, _, operations in recording.log]
    table = table_for(with_profile(changed, profile))
    assert {part["parameters"] for part in seen} == {_parameters(table, UPDATES.get(name, STEPS + WARMUP))}
    _check_times(real, changed, table, sequential=name == "sequential")


SHARDED: dict[str, dict[str, Any]] = {
    "stage 2": {"sharding_configs": {"stage": 2}},
    "stage 3": {"sharding_configs": {"stage": 3}},
    "replicas": {"sharding_configs": {"stage": 3, "sharding_degree": 2}},
    "workers": {"sharding_configs": {"stage": 3, "sharding_degree": 2}, "localsgd": True, "localsgd_configs": {"k_steps": 2}},
    "stage 1, merge": {"sharding_configs": {"stage": 1}, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
}


@pytest.mark.parametrize("name", SHARDED)
def test_shards_travel_as_planned(name: str, session: Session, experiment: Experiment, profile: Profile) -> None:
    """Blocks, exchange and bytes are the simulator's; the first element of each shard has moved; compute is no shorter than the table."""
    strategy = DistributedStrategy.from_dict({"sharding": True, **SHARDED[name]})
    seen: list[dict[str, Any]] = []
    leg = Leg(strategy=strategy, steps=STEPS, warmup_steps=WARMUP, start="initial", evaluate=True)
    run = session._run
    session._run = lambda *arguments: seen.extend(run(*arguments)) or seen  # type: ignore[method-assign, func-returns-value]  # as above
    try:
        real = session.run(leg)
    finally:
        session._run = run  # type: ignore[method-assign]  # see above
    changed = with_profile(experiment.replace(strategy=strategy), profile)
    simulated = simulate(changed)
    assert (real.plan.blocks, real.plan.exchange, real.plan.groups) == (
        simulated.plan.blocks,
        simulated.plan.exchange,
        simulated.plan.groups,
    )
    for column in ("step", "rank", "bytes_sent", "local_steps", "loss"):
        assert real.steps[column].astype(object).tolist() == simulated.steps[column].astype(object).tolist(), column
    table = table_for(changed)
    updates = (STEPS + WARMUP) // strategy.gradient_merge_configs.k_steps
    assert {part["parameters"] for part in seen} == {_parameters(table, updates, real.plan.shard_ranks)}
    _check_times(real, changed, table, sequential=True)


def _check_times(real: RunResult, experiment: Experiment, table: LayerTable, *, sequential: bool) -> None:
    """No step's compute is shorter than the table says, times 1 + X, but by what the host did before it, or longer by much.

    Over all steps of a rank nothing is lost but what the host was ahead of the first.
    """
    cluster = experiment.cluster
    x = draws(cluster.stragglers, experiment.run.seed, cluster.trainers, cluster.trainers_per_node, 1 - WARMUP, STEPS + WARMUP)
    late, over_s = [], [0.0] * cluster.trainers
    for row in real.steps.itertuples():
        own = x[row.rank, row.step - 1 + WARMUP]
        compute_s = stretch(table.forward_ns + table.backward_ns, own) * 1e-9
        assert row.forward_s + row.backward_s >= compute_s - table.forward_ns * 1e-9 - 1e-6
        late.append(row.forward_s + row.backward_s - compute_s)
        step_s = sum(getattr(row, f"{part}_s") for part in ("forward", "backward", "wait", "exposed_comm", "update", "other"))
        over_s[row.rank] += step_s - compute_s - table.read * 1e-9
    assert min(over_s) >= -(table.forward_ns + table.read) * 1e-9
    assert sorted(late)[len(late) // 2] < LATE_S or sequential
    assert real.summary.lateness_s is not None
    assert set(real.summary.lateness_s) == {f"{what}_{key}" for what in ("layer", "step") for key in ("p50", "p95", "max")}
    assert real.summary.lateness_s["step_max"] <= real.summary.lateness_s["layer_max"]


def test_blocking_collectives_hold_compute_up(session: Session) -> None:
    """In sequential execution every all-reduce lies between two layers: compute is longer by at least what they took."""
    sequential = {"fuse_all_reduce_ops": False, "build_strategy": {"enable_sequential_execution": True}}
    one, other = (
        session.run(Leg(strategy=DistributedStrategy.from_dict(fields), steps=STEPS, start="initial"))
        for fields in (sequential, {"fuse_all_reduce_ops": False})
    )
    blocked_ns = sum(span.duration_ns for span in one.spans if span.stream.startswith("communication") and span.rank == 3)
    compute = [float(run.steps[run.steps["rank"] == 3][["forward_s", "backward_s"]].sum(axis=1).sum()) for run in (one, other)]
    assert blocked_ns > 0
    assert compute[0] - compute[1] > 0.8 * blocked_ns * 1e-9 - LATE_S


@pytest.mark.slow
def test_ddp_averages_emulated_gradients_too() -> None:
    """Two ranks: mean gradients of 1.5 (place + 1) in every step, though DDP writes them in place; times are the table's."""
    found = run_ranks(Path(__file__).parent / "emulated_rank.py", 2)
    expected = np.repeat([1.5 * (4 - index + 1) for index in range(5)], 1000)
    for rank in found:
        np.testing.assert_array_equal(rank["gradients"], np.tile(expected, (4, 1)))
        assert (rank["took_ns"] >= (2 * 30_000_000 if rank is found[1] else 30_000_000)).all()
    assert found[0]["took_ns"].min() > 1.9 * 30_000_000  # its last bucket waits for rank 1


LAYERS = """\
schema = 1
name = "one"

[workload]
model = "layers"
steps = 10
layers = [{ name = "block", params = 1000, forward = "0.5 ms", backward = "1 ms", repeat = 10 }]

[cluster]
nodes = 1
trainers_per_node = 1

[run]
device = "emulated"
warmup_steps = 2
"""


@pytest.mark.slow
def test_the_command_runs_a_table_of_layers_and_says_that_it_is_emulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One trainer: 15 ms a step beside 15 simulated, within the lateness; summary, stored run and output say emulated; no losses."""
    path = tmp_path / "one.toml"
    path.write_text(LAYERS, encoding="utf-8")
    assert main(["real", str(path), "--out", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr().out
    assert "emulated compute" in printed.splitlines()[0]
    assert "layers ended late by p50" in printed
    row = next(line for line in printed.splitlines() if "step, mean" in line)
    assert "15.0 ms" in row or "15.00 ms" in row
    (folder,) = (tmp_path / "runs").iterdir()
    assert "emulated compute" in read_report(folder).headline
    run = load_run(folder)
    summary = run.summary
    assert (summary.emulated, summary.device, summary.final_loss) == (True, "emulated", None)
    assert run.steps["loss"].isna().all()
    assert summary.lateness_s is not None
    assert 0.0145 <= summary.step_s["p50"] < 0.015 + LATE_S  # one is shorter by what the one before was late
    assert summary.compute_s - 0.015 <= summary.lateness_s["step_max"] + 0.001
