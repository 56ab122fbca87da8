"""Trainers that sleep, and real parameter servers on threads of the test's own process: whole legs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server_job import job, together
from sim_cases import with_profile

from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key
from fleetbench.quantities import Nanoseconds
from fleetbench.report.compare import compare_runs
from fleetbench.report.fidelity import compare_fidelity
from fleetbench.result import RunResult
from fleetbench.staleness import ServerLoad, counts_of, load_of, quantiles_of
from fleetbench.stragglers import draws, stretch
from real.emulated import emulated_training
from real.emulated.emulated_training import EmulatedTraining
from real.emulated.pace import Pace, lateness_of
from real.job.results import run_of
from real.leg import Leg
from real.servers.leg_servers import loads_of
from real.supported import not_emulated
from real.training import checksum
from sim.run import simulate

BLOCKS, NUMBERS = 9, 3
"""More blocks than gradients have values; in the order of readiness block 8 comes first."""
TRAINERS, SERVERS = 2, 2
WARMUP = 2
NEVER_IDLE = 10**6

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"a_sync": True, "a_sync_configs": {"k_steps": 0}},
    "geo_sgd": {"a_sync": True, "a_sync_configs": {"k_steps": 3, "send_wait_times": NEVER_IDLE}},
}


def experiment(strategy: dict[str, Any], steps: int, **parts: dict[str, Any]) -> Experiment:
    """Two emulated trainers and two servers, of blocks that compute for 0.3 ms in all, unless said otherwise."""
    block = {"name": "block", "params": NUMBERS, "forward": "10 us", "backward": "20 us", "repeat": BLOCKS}
    return Experiment.from_dict(
        {
            "workload": {"model": "layers", "layers": [block], "lr": 0.25, "steps": steps} | parts.get("workload", {}),
            "cluster": {"nodes": TRAINERS, "servers": SERVERS, "inter": {"bandwidth": "1 Gbit/s", "latency": "50 us", "payload": True}}
            | parts.get("cluster", {}),
            "strategy": {"mode": "ps"} | strategy,
            "run": {"device": "emulated", "warmup_steps": WARMUP, "seed": 3} | parts.get("run", {}),
        }
    )


def train(made: Experiment, profile: Profile | None = None) -> tuple[list[dict[str, Any]], torch.Tensor, list[ServerLoad]]:
    """A whole leg on threads: what ranks write, what servers hold in the end, and their reports."""
    trainers = made.cluster.trainers
    parts: list[dict[str, Any]] = [{} for _ in range(trainers)]
    with job(made.cluster.servers, trainers) as running:
        leg = Leg(
            strategy=made.strategy,
            steps=made.workload.steps,
            warmup_steps=made.run.warmup_steps,
            start="initial",
            evaluate=True,
            endpoints=running.endpoints,
        )

        def work(rank: int) -> None:
            cpu = torch.device("cpu")
            meets: Any = SimpleNamespace(rank=rank, trainers=trainers, device=cpu)  # trainers of servers meet in no collective
            training = EmulatedTraining(made if profile is None else with_profile(made, profile), meets)
            try:
                parts[rank] = training.run(leg, lambda _: None)
            finally:
                training.close()

        together(*(partial(work, rank) for rank in range(trainers)))
        reports = running.reports()
        return parts, running.dense(), reports


def gradient(block: int) -> float:
    """Rank 0's gradient of a block by hand: places in the order of readiness count 1 to 7, again and again."""
    return float((BLOCKS - 1 - block) % 7 + 1)


def agrees(parts: Sequence[dict[str, Any]], held: torch.Tensor, expected: Sequence[float]) -> None:
    """Servers hold the expected numbers exactly, and all trainers end with them."""
    assert held.tolist() == list(expected)
    model = torch.nn.Module()
    for block, numbers in enumerate(held.split(NUMBERS)):
        model.register_parameter(str(block), torch.nn.Parameter(numbers))
    assert {part["parameters"] for part in parts} == {checksum(model)}


def test_synchronous_servers_update_by_the_mean_of_the_probes() -> None:
    """Gradients are (rank + 1) g: six updates by 1.5 g, four with a rate of 1/4 and two with half of it, move all by -1.875 g."""
    made = experiment({}, 4, workload={"lr_decay": [{"step": 3, "factor": 0.5}]})
    parts, held, reports = train(made)
    agrees(parts, held, [-1.25 * 1.5 * gradient(block) for block in range(BLOCKS) for _ in range(NUMBERS)])
    assert [report.staleness.total() for report in reports] == [4 * TRAINERS] * SERVERS


@pytest.mark.parametrize(
    "configs",
    [{}, {"max_merge_var_num": 4, "thread_pool_size": 2, "independent_recv_thread": True}],
    ids=["Fleet's defaults", "merged, several in flight"],
)
def test_asynchronous_servers_end_with_the_sum_of_all_pushes(configs: dict[str, Any]) -> None:
    """SGD is linear: in whatever order seven pushes of g and seven of 2 g come, and however they are merged, all move by -21/4 g."""
    made = experiment({"a_sync": True, "a_sync_configs": {"k_steps": 0, **configs}}, 5)
    parts, held, _ = train(made)
    agrees(parts, held, [-0.25 * 7 * 3 * gradient(block) for block in range(BLOCKS) for _ in range(NUMBERS)])


def test_geo_sgd_loses_and_invents_nothing() -> None:
    """Each exchange brings half of what a trainer has over its copy: server and rests together are all that trainers have done.

    14 steps, K = 3: exchanges of 3, 3, 3, 3 and, at the end, 2. Only first numbers move where trainers update by themselves.
    """
    made = experiment(MODES["geo_sgd"], 14, run={"warmup_steps": 0})
    parts, held, reports = train(made)
    pushed = rests = 0.0
    for rank in range(TRAINERS):
        rest = 0.0
        for steps in (3, 3, 3, 3, 2):
            rest += steps * (rank + 1)
            pushed, rest = pushed + rest / 2, rest - rest / 2
        rests += rest
    assert pushed + rests == 14 * (1 + 2)
    moved = [-0.25 * pushed * gradient(block) for block in range(BLOCKS)]
    agrees(parts, held, [number for first in moved for number in (first, 0.0, 0.0)])
    assert [report.staleness.total() for report in reports] == [5 * TRAINERS] * SERVERS


def test_servers_update_with_the_workloads_optimizer() -> None:
    """Adam's first update is the rate in each number's direction, whatever the gradient's size; one step, all numbers."""
    made = experiment({}, 1, workload={"optimizer": "adam"}, run={"warmup_steps": 0})
    _, held, _ = train(made)
    assert held.numpy() == pytest.approx([-0.25] * (BLOCKS * NUMBERS), rel=1e-6)


def by_hand(made: Experiment, dtypes: Sequence[str] = ("float32", "float32")) -> Profile:
    """5 + 10 ms of compute, an update of 3 ms, a batch in 2 ms; two gradients."""
    layers = tuple(
        Layer(
            name=name,
            gradients=(Gradient(name=f"{name}.weight", numel=6, dtype=dtype, ready=Nanoseconds(ready)),),
            forward=Nanoseconds(2_500_000),
            backward=Nanoseconds(5_000_000),
        )
        for name, ready, dtype in (("stem", 10_000_000, dtypes[0]), ("head", 5_000_000, dtypes[1]))
    )
    table = LayerTable(key=compute_key(made), layers=layers, update=Nanoseconds(3_000_000), read=Nanoseconds(2_000_000))
    return Profile(machine="by hand", created="2026-01-01", tables=(table,))


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_sleeps_until_its_deadlines_and_no_longer(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One trainer on a clock that only sleeps move: (1 + X) 15 ms and 2 ms of reading a step; its own update, 3 ms, in GeoSGD alone."""
    now_ns = [5_000_000_000]

    def sleep(seconds: float) -> None:
        now_ns[0] += round(seconds * 1e9)

    monkeypatch.setattr(emulated_training, "Pace", partial(Pace, clock=lambda: now_ns[0], sleep=sleep))
    cluster = {"nodes": 1, "stragglers": [{"kind": "jitter", "distribution": "gamma", "mean": 0.5, "cv": 1.0}]}
    made = experiment(MODES[mode], 8, workload={"model": "mlp", "layers": []}, cluster=cluster)
    parts, _, _ = train(made, by_hand(made))
    x = draws(made.cluster.stragglers, 3, 1, 1, 1 - WARMUP, 8 + WARMUP)[0]
    own_ns = 2_000_000 + (3_000_000 if mode == "geo_sgd" else 0)
    assert now_ns[0] - 5_000_000_000 == sum(stretch(15_000_000, int(value)) + own_ns for value in x)
    assert len(set(map(int, x))) == 8 + WARMUP
    assert parts[0]["lateness"]["step"] == [(0, 8)]


def result(made: Experiment, parts: Sequence[dict[str, Any]], reports: Sequence[ServerLoad]) -> RunResult:
    """The run, as a session makes it of what ranks and servers write."""
    told = [
        {"staleness": sorted(one.staleness.items()), "busy_ns": one.busy_ns, "span_ns": one.until_ns - one.since_ns, "roles": []}
        for one in reports
    ]
    return run_of(
        made,
        Leg(strategy=made.strategy, steps=made.workload.steps, evaluate=True),
        parts,
        told,
        skipped=not_emulated(made, made.strategy),
        lateness_s=lateness_of([part["lateness"] for part in parts]),
        staleness=quantiles_of(counts_of(loads_of(told))),
        server_load=load_of(loads_of(told)),
    )


def apart(*runs: RunResult) -> float:
    """Half of what the shares of gradients of each age differ by, over all ages: the total variation between two histograms."""
    shares = []
    for run in runs:
        assert run.summary.server_load is not None
        histogram = run.summary.server_load["staleness_histogram"]
        assert histogram
        shares.append({int(age): num / sum(histogram.values()) for age, num in histogram.items()})
    first, second = shares
    return sum(abs(first.get(age, 0.0) - second.get(age, 0.0)) for age in {*first, *second}) / 2


SIMULATED_ALONE = ("lateness_s", "engine", "loss_from")
REAL_ALONE = ("lateness_s.",)


@pytest.mark.parametrize("mode", MODES)
def test_a_simulated_and_a_real_run_are_comparable(mode: str) -> None:
    """One experiment: the same figures by the same names, the same steps, and compute that no sleep cut short.

    Warm-up steps are in neither's load: a synchronous server has seen one gradient, of age 0, of each trainer and counted step. No
    step has a loss; after the last there is a declared curve's where no gradient is stale; and both leave a target out, for one reason.
    """
    curve = {"start": 2.0, "floor": 1.0, "half_life": "6 steps"}
    losses = {"loss_curve": curve, "target_loss": 1.9, "eval_every": 1}
    made = experiment(MODES[mode], 6, cluster={"stragglers": [{"kind": "jitter", "mean": 0.3}]}, workload=losses)
    parts, _, reports = train(made)
    real, simulated = result(made, parts, reports), simulate(made)
    comparison = compare_runs(simulated, real)
    assert comparison.staleness_variation == pytest.approx(apart(simulated, real), abs=1e-12)
    if mode == "synchronous":
        assert comparison.staleness_variation == 0
    for row in comparison.rows:
        assert row.key.startswith(SIMULATED_ALONE + REAL_ALONE) or (row.a is None) == (row.b is None), row
    fidelity = compare_fidelity(simulated, real)
    assert fidelity is not None
    assert fidelity["differences"] == []
    assert fidelity["errors"] is not None
    assert "the real run emulated its compute: it slept, and sent real bytes" in fidelity["notes"]
    compute = [run.steps[["forward_s", "backward_s"]].sum(axis=1) for run in (simulated, real)]
    assert (compute[1] >= compute[0] - 1e-6).all()
    for run in (simulated, real):
        load = run.summary.server_load
        assert load is not None
        if mode == "synchronous":
            assert load["staleness_histogram"] == {"0": 6 * TRAINERS * SERVERS}
            assert run.summary.num_syncs == 6
        elif mode == "geo_sgd":  # exchanges after steps 3 and 6 and at the end, of 2 + 6 steps
            assert sum(load["staleness_histogram"].values()) == 3 * TRAINERS * SERVERS
        assert max(map(int, load["staleness_histogram"])) < TRAINERS * (6 + WARMUP)  # all that there are to miss
        assert run.steps["loss"].isna().all()
        assert run.summary.final_loss == (1.5 if mode == "synchronous" else None)
        assert run.summary.time_to_target_s is None
        reasons = [entry["why"] for entry in run.summary.skipped if entry["what"] == "workload.target_loss"]
        assert reasons == ["stale gradients do not follow a declared curve"]
    assert parts[0]["held_out"] == []
    assert real.summary.samples_per_s == pytest.approx(TRAINERS * 6 * 32 / real.summary.wall_s)


def test_what_is_left_at_the_end_goes_out_in_the_last_step_of_both() -> None:
    """A GeoSGD trainer whose K is not reached pushes its 40 kB after its third step: before that, not even those of its joining count.

    Simulated, that is 320 us on the trainer's link each way, and four times a latency of 50 us.
    """
    block = {"name": "all", "params": 10_000, "forward": "10 us", "backward": "20 us"}
    configs = {"k_steps": 100, "send_wait_times": NEVER_IDLE}
    made = experiment(
        {"a_sync": True, "a_sync_configs": configs}, 3, workload={"layers": [block]}, cluster={"nodes": 1}, run={"warmup_steps": 0}
    )
    parts, _, reports = train(made)
    simulated = simulate(made)
    for run in (result(made, parts, reports), simulated):
        first, second, third = run.steps["bytes_sent"]
        assert max(first, second) < 10_000  # of beats
        assert 40_000 <= third < 50_000
    assert list(simulated.steps["exposed_comm_s"]) == pytest.approx([0, 0, 840e-6])
