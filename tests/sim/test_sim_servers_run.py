"""Parameter servers as an experiment: what ``simulate`` makes of a file, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from sim_cases import link, profiled, with_profile

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.measurements import Threads
from fleetbench.plan.operations import Operation
from fleetbench.quantities import Nanoseconds
from fleetbench.result import Summary
from sim.run import simulate
from sim.servers.simulate import job_of


def experiment(**changes: Any) -> Experiment:
    """Four trainers and a server at 1 byte/ns: 10 layers of 0.4 MB, 1 ms forward and 2 ms backward each."""
    data: dict[str, Any] = {
        "name": "served",
        "workload": {
            "model": "layers",
            "layers": [{"name": "block", "params": 100_000, "forward": "1 ms", "backward": "2 ms", "repeat": 10}],
            "steps": 20,
        },
        "cluster": {"nodes": 4, "servers": 1, "inter": {"bandwidth": "8 Gbit/s", "latency": "10 us"}},
        "strategy": {"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 0}},
        "run": {"warmup_steps": 2},
    }
    for name, value in changes.items():
        data[name] = data[name] | value
    return Experiment.from_dict(data)


def test_a_run_knows_throughput_waiting_queue_and_staleness() -> None:
    """The summary has them, survives being written, and is the same for the same experiment."""
    result = simulate(experiment(cluster={"stragglers": [{"kind": "jitter", "mean": 0.2}]}))
    summary = result.summary
    assert (summary.trainers, summary.servers, summary.steps) == (4, 1, 20)
    assert set(summary.staleness or ()) == {"mean", "p50", "p95", "max"}
    load = summary.server_load
    assert load is not None
    assert load["utilisation"] == 0  # a declared table has no update
    assert sum(load["staleness_histogram"].values()) > 0
    assert summary.compute_s == pytest.approx(0.03 * 1.2, rel=0.05)
    assert summary.wall_s * summary.samples_per_s == pytest.approx(4 * 20 * 32)
    assert set(result.steps["step"]) == set(range(-1, 21))
    again = simulate(experiment(cluster={"stragglers": [{"kind": "jitter", "mean": 0.2}]}))
    assert again.steps.equals(result.steps)
    assert dataclasses.replace(again.summary, run_id=summary.run_id) == summary
    assert json.loads(summary.to_json())["server_load"] == load
    assert Summary(**{**json.loads(summary.to_json()), "skipped": ()}).staleness == summary.staleness


def test_step_times_add_up() -> None:
    """Compute, stall, update and the rest are the step, in every mode, and synchronous training is never stale."""
    for strategy in ({"a_sync": False, "a_sync_configs": {}}, {}, {"a_sync_configs": {"k_steps": 4}}):
        summary = simulate(experiment(strategy=strategy)).summary
        parts = summary.compute_s + summary.wait_s + summary.exposed_comm_s + summary.update_s + summary.other_s
        assert parts == pytest.approx(summary.step_s["mean"])
        if strategy.get("a_sync") is False:
            assert summary.staleness == {"mean": 0, "p50": 0, "p95": 0, "max": 0}
            assert summary.num_syncs == 20


NEVER_IDLE = 10**6
"""Pauses of 10 ms."""
FREE = {"a_sync_configs": {"k_steps": 0, "send_queue_size": 1000}}


@pytest.mark.parametrize(
    ("host", "step_ms"),
    [
        ({"read": "4 ms"}, [34] * 20),
        ({"load": "10 ms", "read": "1 ms"}, [41] * 20),
        ({"load": "80 ms", "loaders": 1}, [80] * 20),
        ({"load": "80 ms", "loaders": 4}, [30] * 20),
        ({"fetch": "5 ms"}, [35, 30, 30, 30, 30] * 4),
    ],
    ids=["read", "load", "a loader that falls behind", "loaders that do not", "fetch"],
)
def test_the_hosts_work_is_simulated_as_with_collectives(host: dict[str, Any], step_ms: list[int]) -> None:
    """A trainer whose queue is never full steps as its host lets it: 30 ms of compute, after what is read, loaded and read back.

    After five steps of warm-up, results are read back at the start of the counted steps 1, 6, 11 and 16.
    """
    made = experiment(workload={"host": host}, cluster={"nodes": 1}, strategy=FREE | {"fetch_every_n_steps": 5}, run={"warmup_steps": 5})
    steps = simulate(made).steps
    starts = steps[steps["step"] >= 1]["start_s"].to_numpy()
    assert (starts[1:] - starts[:-1]) * 1e3 == pytest.approx(step_ms[:-1], abs=1e-6)


@pytest.mark.parametrize(
    ("k_steps", "gbit_per_s", "pauses", "pushes"),
    [
        (1, 0.8, NEVER_IDLE, 4 * 40),
        (20, 0.8, NEVER_IDLE, 4 * 2),
        (20, 80, NEVER_IDLE, 4 * 2),
        (15, 80, NEVER_IDLE, 4 * 3),
        (20, 80, 1, 4 * 40),
    ],
    ids=["every step", "every 20", "every 20, fast link", "every 15, and the rest", "every 20, but idle within a step"],
)
def test_k_steps_bound_how_often_geo_sgd_exchanges(k_steps: int, gbit_per_s: float, pauses: int, pushes: int) -> None:
    """Four trainers make 40 steps of 30 ms: a push each every K of them, and at the end; or sooner, where a step outlasts the pauses.

    Over the slow link all their pushes of 4 MB take 160 ms, and so do pulls: 20 steps hide them, one step does not.
    """
    made = experiment(
        workload={"steps": 40},
        cluster={"inter": {"bandwidth": f"{gbit_per_s} Gbit/s", "latency": "10 us", "payload": True}},
        strategy={"a_sync_configs": {"k_steps": k_steps, "send_wait_times": pauses}},
        run={"warmup_steps": 0},
    )
    summary = simulate(made).summary
    assert summary.server_load is not None
    assert sum(summary.server_load["staleness_histogram"].values()) == pushes
    assert summary.step_s["p50"] == pytest.approx(0.03 if gbit_per_s > 1 or k_steps > 1 else 0.32, rel=0.02)


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ({"k_steps": 400}, "at most 400 steps between two exchanges, and fewer if the link is fast enough: a step takes 30 ms"),
        ({"k_steps": -1}, "at most 800 steps"),
        ({"k_steps": 0, "max_merge_var_num": 5}, "at most 5 steps"),
        ({"k_steps": 400, "send_wait_times": 4}, None),
        ({"k_steps": 1}, None),
        ({"k_steps": 0}, None),
    ],
)
def test_steps_longer_than_the_idle_time_are_said_once(configs: dict[str, int], says: str | None) -> None:
    """With both numbers and the pauses that keep K: 30 ms a step and an idle time of 10 ms; not where the idle time is 40 ms."""
    made = experiment(cluster={"inter": {"bandwidth": "80 Gbit/s", "latency": "10 us"}}, strategy={"a_sync_configs": configs})
    found = [entry for entry in simulate(made).summary.skipped if entry["what"].startswith("strategy.a_sync_configs")]
    assert len(found) == (says is not None)
    if says is not None:
        assert says in found[0]["why"]
        assert "idle after 10 ms (send_wait_times = 1)" in found[0]["why"]
        assert "send_wait_times = 5" in found[0]["why"]


@pytest.mark.parametrize(("cores", "factor"), [(8, 1.0), (4, 1.6), (2, 3.2)])
@pytest.mark.parametrize("k_steps", [0, 4])
def test_threads_without_a_core_slow_trainers_but_not_servers(cores: int, factor: float, k_steps: int) -> None:
    """As with collectives: two trainers of four threads compute as the profile's trainers with their share of the cores did.

    So long do their own updates take, in GeoSGD; a server has a host to itself, and updates as fast as the profile's trainers.
    """
    made, profile = profiled(
        [([100], [200], 100, 200)],
        {"update": Nanoseconds(1000)},
        nodes=1,
        trainers_per_node=2,
        servers=1,
        inter=link(8),
        cores_per_node=cores,
        strategy={"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": k_steps}, "thread_num": 4, "fuse_all_reduce_ops": True},
    )
    lines = tuple(
        Threads(thread_num=n, step=Nanoseconds(took), compute=Nanoseconds(took), contention=0.0, collective_contention=0.0, unexplained=0.0)
        for n, took in ((1, 960), (2, 480), (4, 300))
    )
    profile = dataclasses.replace(profile, threads=lines, cores=8)
    job = job_of(with_profile(made, profile))
    assert (job.table.forward_ns, job.table.backward_ns) == (100 * factor, 200 * factor)
    assert job.costs.took_ns("trainer", 0, Operation(id=0, kind="update"), 0) == 1000 * factor
    assert job.costs.took_ns("server", 0, Operation(id=0, kind="update"), 400) == 1000
    result = simulate(with_profile(made, profile))
    assert result.summary.compute_s == pytest.approx(300e-9 * factor)
    assert result.summary.skipped == ()


def test_a_server_handles_what_it_receives_and_sends_at_its_hosts_pace() -> None:
    """Synchronous, a host of 2 ns a byte, 4 MB of gradients: one trainer's step takes the server 8 ms for the push, and 8 for the answer.

    Of two trainers both pushes and both answers, 32. The second has its answer 8 ms after the first, and so has the link for itself, twice:
    30 + 4 + 16 + 16 + 4 ms, where with a host that takes no time two share the link, 30 + 8 + 8.
    """
    synchronous = {"a_sync": False, "a_sync_configs": {}}

    def step_s(trainers: int, **cluster: Any) -> float:
        made = experiment(cluster={"nodes": trainers, **cluster}, strategy=synchronous)
        return simulate(made).summary.wall_s / made.workload.steps

    slow = {"host_bandwidth": "500 MB/s"}
    assert step_s(1, **slow) - step_s(1) == pytest.approx(0.016, rel=1e-3)
    assert step_s(2, **slow) - step_s(2) == pytest.approx(0.024, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"cluster": {"inter": None, "nodes": 1}}, "neither declared nor measured"),
        ({"cluster": {"racks": {"nodes": 2, "oversubscription": 2.0}}}, r"cluster\.racks"),
        ({"strategy": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}}, "gradient_merge"),
        ({"workload": {"optimizer": "adam"}, "strategy": {"a_sync_configs": {"k_steps": 5}}}, "GeoSGD adds up"),
    ],
)
def test_what_is_not_simulated_is_refused(changes: dict[str, Any], match: str) -> None:
    """By name, with a hint."""
    data = {name: {key: item for key, item in value.items() if item is not None} for name, value in changes.items()}
    made = experiment(**data)
    if "cluster" in changes and "inter" in changes["cluster"]:
        made = made.replace(cluster=dataclasses.replace(made.cluster, inter=None))
    with pytest.raises(ConfigError, match=match) as caught:
        simulate(made)
    assert caught.value.hint


def test_roles_are_recorded_when_asked() -> None:
    """Every trainer's, sender's and server's events give the operations that were executed."""
    assert simulate(experiment()).recordings == ()
    found = simulate(experiment(), record=True).recordings
    whose = [("sender", rank) for rank in range(4)] + [("server", 0)] + [("trainer", rank) for rank in range(4)]
    assert [(role.role, role.rank) for role in found] == whose
    for role in found:
        assert len(role.log) > 20
        assert role.replayed() == [operations for _, _, operations in role.log]


def test_a_trainer_of_servers_reads_results_that_are_due_after_its_last_step() -> None:
    """20 steps read back after each 10th: 3 ms in front of the 11th, and at the end of the 20th."""
    strategy = {"a_sync": False, "a_sync_configs": {}, "fetch_every_n_steps": 10}
    result = simulate(experiment(workload={"host": {"fetch": "3 ms"}}, strategy=strategy, run={"warmup_steps": 0}))
    other_ms = [round(value * 1e3, 3) for value in result.steps["other_s"]]
    assert other_ms == [*[0.0] * 10, 3.0, *[0.0] * 8, 3.0] * 4
