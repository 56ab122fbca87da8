"""``fleetbench real`` with ``cluster.servers`` above 0: the same experiment by collectives and by servers."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.workloads.models.registry import build_model
from real.job.session import measure


def experiment(strategy: dict[str, Any] | None, servers: int, **run: Any) -> Experiment:
    """Two trainers on the digits, a few steps."""
    return Experiment.from_dict(
        {
            "workload": {"model": "digits_mlp", "steps": 25, "lr": 0.1, "batch_size": 16},
            "cluster": {"trainers_per_node": 2, "servers": servers},
            "strategy": strategy or {},
            "run": {"warmup_steps": 2, "timeout": "30 s", **run},
        }
    )


SERVED = {"mode": "ps", "a_sync": True}


@pytest.fixture(scope="module")
def by_servers() -> RunResult:
    """Synchronous training with two servers, recorded."""
    return measure(experiment({"mode": "ps"}, 2), record=True)


@pytest.mark.slow
def test_synchronous_servers_train_as_the_all_reduce_does(by_servers: RunResult) -> None:
    """Two trainers and two servers end with the held-out loss of two trainers that all-reduce, and lose no step."""
    by_all_reduce = measure(experiment(None, 0))
    assert by_all_reduce.summary.final_loss is not None
    assert by_servers.summary.final_loss == pytest.approx(by_all_reduce.summary.final_loss, abs=1e-5)
    ours, theirs = by_servers.steps, by_all_reduce.steps
    assert list(ours["loss"]) == pytest.approx(list(theirs["loss"]), abs=1e-4)
    assert by_servers.summary.servers == 2


def test_a_served_run_fills_the_schema(by_servers: RunResult) -> None:
    """Times add up to steps, waiting for servers is seen, bytes are counted, a round is never stale, what was not realised is listed."""
    summary, steps = by_servers.summary, by_servers.steps
    assert summary.staleness == {"mean": 0.0, "p50": 0.0, "p95": 0.0, "max": 0.0}
    assert summary.num_syncs == 25
    assert (steps["exposed_comm_s"] > 0).all()
    parts = summary.compute_s + summary.wait_s + summary.exposed_comm_s + summary.update_s + summary.other_s
    assert parts == pytest.approx(summary.step_s["mean"], rel=1e-6)
    workload = by_servers.experiment.workload
    nbytes = 4 * sum(parameter.numel() for parameter in build_model(workload.model, workload.model_options, workload.dtype, 0).parameters())
    assert 25 * nbytes < summary.bytes_sent_per_trainer < 1.2 * 25 * nbytes
    assert {"cluster.server_placement"} <= {entry["what"] for entry in summary.skipped}
    assert summary.server_load is not None
    assert 0 < summary.server_load["utilisation"] <= 1


@pytest.mark.slow
def test_a_served_run_is_recorded_when_asked(by_servers: RunResult) -> None:
    """Both trainers', senders' and servers' events give the operations that were executed: a gradient a step, and a round of two a step."""
    whose = [("sender", 0), ("sender", 1), ("server", 0), ("server", 1), ("trainer", 0), ("trainer", 1)]
    assert [(role.role, role.rank) for role in by_servers.recordings] == whose
    for role in by_servers.recordings:
        assert role.replayed() == [operations for _, _, operations in role.log]
        updates = [operation for _, _, operations in role.log for operation in operations if operation.kind == "update"]
        assert len(updates) == (27 if role.role == "server" else 0)


@pytest.mark.parametrize("k_steps", [0, 5], ids=["asynchronous", "geo_sgd"])
@pytest.mark.slow
def test_asynchronous_runs_learn_and_know_their_staleness(k_steps: int) -> None:
    """The loss falls, and each gradient, or each push of GeoSGD, has its staleness in the histogram; warm-up is not counted.

    A gradient of before may still be on its way when the first counted step begins.
    """
    result = measure(experiment({**SERVED, "a_sync_configs": {"k_steps": k_steps}}, 1))
    losses = result.steps.sort_values("step")["loss"]
    assert losses.tail(6).mean() < losses.head(6).mean()
    assert result.summary.final_loss is not None
    assert result.summary.staleness is not None
    histogram = result.summary.server_load["staleness_histogram"]  # type: ignore[index]  # there are servers
    gradients = sum(histogram.values())
    assert 2 * 25 <= gradients <= 2 * 27 if k_steps == 0 else 10 <= gradients <= 2 * 27
    assert 0 <= result.summary.staleness["mean"] <= result.summary.staleness["max"]
