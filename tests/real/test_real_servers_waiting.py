"""Where a trainer's step goes: waiting for another trainer, and for servers."""

from __future__ import annotations

import time

import pytest
import torch
from server_job import SYNCHRONOUS, Job, job, served, together

from fleetbench.result import StepRecord, steps_table
from fleetbench.strategy import DistributedStrategy
from real.servers.links import TrainerOptions
from real.servers.served_training import ServedTraining

SLOWER_S = 0.03
STEPS = 3


def records(running: Job, rank: int, strategy: DistributedStrategy) -> list[StepRecord]:
    """Three steps, each of which rank 1 ends so much after the moment at which the server has rank 0's gradient."""
    model = torch.nn.Linear(2, 1)
    options = TrainerOptions(rank=rank, endpoints=running.endpoints, trainers=2, keep_times=True, **running.options)  # type: ignore[arg-type]  # as given
    training = ServedTraining(model, strategy, options)
    running.trainings.append(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training.attach_optimizer(optimizer)
    training.begin()
    for _ in range(STEPS):
        loss = model(torch.ones(1, 2)).sum()
        if rank == 1 and strategy.a_sync is False:
            while 0 not in running.threads[0].server._arrived:
                time.sleep(0.001)
            time.sleep(SLOWER_S)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    training.stopwatch.finish()
    training.finish()
    return [timed.record for timed in training.stopwatch.steps]


def test_synchronous_trainers_wait_for_the_slowest_and_for_their_servers() -> None:
    """Rank 0 waits for rank 1 by the difference of their being ready, and both for the server by the rest of what they wait."""
    found: dict[int, list[StepRecord]] = {}
    with job(1, 2) as running:

        def work(rank: int) -> None:
            found[rank] = records(running, rank, SYNCHRONOUS)

        together(lambda: work(0), lambda: work(1))
    for first, second in zip(found[0], found[1], strict=True):
        assert first.arrival_ns is not None
        assert second.arrival_ns is not None
        assert second.arrival_ns - first.arrival_ns >= SLOWER_S * 1e9
        assert second.start_ns + second.forward_ns + second.backward_ns <= second.arrival_ns < second.end_ns
    table = steps_table(found[0] + found[1]).set_index(["rank", "step"])
    late_s = table.loc[1]["arrival_s"] - table.loc[0]["arrival_s"]
    assert table.loc[0]["wait_s"].tolist() == pytest.approx(late_s.tolist(), abs=1e-9)
    assert (table.loc[1]["wait_s"] == 0).all()
    assert (table["exposed_comm_s"] > 0).all()


def test_asynchronous_trainers_wait_for_no_other() -> None:
    """Nothing is called waiting for the slowest."""
    found: dict[int, list[StepRecord]] = {}
    with job(1, 2) as running:

        def work(rank: int) -> None:
            found[rank] = records(running, rank, served())

        work(0)
        work(1)
    assert [record.arrival_ns for record in found[0] + found[1]] == [None] * 2 * STEPS
