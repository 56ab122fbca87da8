"""A job with parameter servers that begins from the checkpoint of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from server_job import SYNCHRONOUS, Job, add_gradients, job, served, together

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.servers.served_training import ServedTraining


def trainer(
    running: Job, rank: int, strategy: DistributedStrategy, momentum: float, size: int = 2
) -> tuple[ServedTraining, torch.nn.Module, torch.optim.Optimizer]:
    """A trainer of numbers that begin at 0."""
    model = torch.nn.Linear(size, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
    return running.trainer(rank, model, optimizer, strategy), model, optimizer


def write(folder: Path) -> None:
    """The checkpoint of a job of one asynchronous trainer after a step whose gradients are 1."""
    with job(2) as running:
        training, model, optimizer = trainer(running, 0, served(), 0.9)
        add_gradients(model, 1.0)
        optimizer.step()
        training.flush()
        training.save(folder)
        training.finish()
        running.reports()


def restart(running: Job, folder: Path, *servers: int) -> None:
    """Let servers of a new job begin from the folder."""
    for server in servers:
        running.threads[server].abandon()
        running.threads[server] = running.start(server, restore=folder)


def test_a_job_of_other_trainers_rules_and_options_begins_from_the_file(tmp_path: Path) -> None:
    """V = 1, p = -1 in the file; two synchronous trainers and a momentum of 0.5: v = 0.5 + (1 + 2) / 2, p = -1 - v."""
    write(tmp_path)
    with job(2, 2) as running:
        restart(running, tmp_path, 0, 1)

        def work(rank: int) -> None:
            training, model, optimizer = trainer(running, rank, SYNCHRONOUS, 0.5)
            assert model.weight.tolist() == [[-1.0, -1.0]]
            add_gradients(model, 1.0 + rank)
            optimizer.step()
            training.finish()

        together(lambda: work(0), lambda: work(1))
        running.reports()
        assert running.dense().tolist() == [-3.0, -3.0]


@pytest.mark.parametrize(("size", "momentum", "named"), [(3, 0.9, "shards"), (2, 0.0, "optimizer .momentum on the server, sgd")])
def test_another_model_or_optimizer_is_refused_by_name(size: int, momentum: float, named: str, tmp_path: Path) -> None:
    """The error says what differs."""
    write(tmp_path)
    with job(2) as running:
        restart(running, tmp_path, 0, 1)
        with pytest.raises(ConfigError, match=named):
            trainer(running, 0, served(), momentum, size)


def test_trained_and_initial_parameters_are_not_mixed(tmp_path: Path) -> None:
    """Server 0 begins from the file, server 1 does not: rank 0 brings it nothing, and names it."""
    write(tmp_path)
    with job(2) as running:
        restart(running, tmp_path, 0)
        with pytest.raises(ConfigError, match="server 1: has no checkpoint to begin from"):
            trainer(running, 0, served(), 0.9)


def test_a_second_process_of_a_rank_is_refused() -> None:
    """A job that is started twice trains with the first of each rank."""
    with job(1, 2) as running:
        trainer(running, 0, served(), 0.0)
        with pytest.raises(ConfigError, match="another process has joined as rank 0"):
            trainer(running, 0, served(), 0.0)
