"""Trainers that start again, as new processes: they join a job that is under way, and wait for no meeting that is after the others."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from server_job import PATIENCE_S, SYNCHRONOUS, Job, job, together
from test_real_servers_training import add, counting

from fleetbench.errors import WorkerFailed
from fleetbench.plan.events import DataEnd, Event
from fleetbench.strategy import ASyncConfigs, DistributedStrategy

ASYNCHRONOUS = DistributedStrategy(mode="ps", a_sync=True, a_sync_configs=ASyncConfigs(k_steps=0))
GEO_SGD = DistributedStrategy(mode="ps", a_sync=True, a_sync_configs=ASyncConfigs(k_steps=2))


def until(condition: Callable[[], object]) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


def begin(running: Job, strategy: DistributedStrategy) -> list[tuple]:
    """Both trainers, which meet at the launch barrier."""
    begun: list[tuple] = [(), ()]

    def join(rank: int) -> Callable[[], None]:
        return lambda: begun.__setitem__(rank, counting(running, rank, strategy))

    together(join(1), join(0))
    return begun


@pytest.mark.parametrize("strategy", [ASYNCHRONOUS, GEO_SGD], ids=["asynchronous", "geo_sgd"])
def test_a_trainer_that_starts_again_does_not_wait_at_the_launch_barrier(strategy: DistributedStrategy) -> None:
    """With the defaults: its place was at that meeting before; it goes on at once, and the next barrier is everybody's next."""
    with job(2, 2) as running:
        (_, _, first), (model, optimizer, training) = begin(running, strategy)
        add(model, optimizer, 3, 2.0, 0.0)
        training.flush()
        training.close()  # its process is gone, without a word
        model, optimizer, training = counting(running, 1, strategy)
        add(model, optimizer, 4, 2.0, 0.0)
        together(training.flush)
        together(training.barrier, first.barrier)
        together(training.finish, first.finish)
        sent = -2.0 if strategy is ASYNCHRONOUS else -1.0  # half of it
        assert torch.equal(running.table()[3:], torch.full((2, 2), sent))


@pytest.mark.parametrize("strategy", [ASYNCHRONOUS, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_all_trainers_wait_for_each_other_at_the_launch(strategy: DistributedStrategy) -> None:
    """Rank 0 has not begun before rank 1 comes; with ``launch_barrier`` off it has."""
    with job(2, 2) as running:
        begun: list[int] = []

        def join(rank: int) -> None:
            counting(running, rank, strategy)
            begun.append(rank)

        def come_late() -> None:
            until(lambda: running.threads[0].server._state.met)  # rank 0 is there, and waits
            assert begun == []
            join(1)

        together(lambda: join(0), come_late)
        assert sorted(begun) == [0, 1]


def test_a_trainer_that_starts_again_comes_to_a_meeting_that_was_half_met() -> None:
    """Its life before came to the second barrier on server 0 alone; rank 0 still waits on server 1, until the new one is there, too."""
    with job(2, 2) as running:
        (_, _, first), (_, _, training) = begin(running, ASYNCHRONOUS)
        links = training._sender_links
        assert links is not None
        ask = links.ask
        links.ask = lambda server, *rest, **named: ask(server, *rest, **named) if server == 0 else None  # type: ignore[method-assign]  # cut short
        training._joined().tell("barrier")
        first._joined().tell("barrier")
        servers = [thread.server for thread in running.threads]
        until(lambda: servers[0]._meetings == 2 and servers[1]._state.met == (0,))
        training.close()
        fresh: list[tuple] = []
        together(lambda: fresh.append(counting(running, 1, ASYNCHRONOUS)), lambda: first._await("barrier"))
        together(fresh[0][2].barrier, first.barrier)
        assert [server._meetings for server in servers] == [3, 3]
        together(fresh[0][2].finish, first.finish)


@pytest.mark.parametrize("strategy", [ASYNCHRONOUS, GEO_SGD], ids=["asynchronous", "geo_sgd"])
def test_leaving_a_server_that_has_died_takes_no_longer_than_a_silence(strategy: DistributedStrategy) -> None:
    """The trainer raises and names it; the other server lets the trainer go."""
    with job(2, 1, timeout_s=1.0) as running:
        model, optimizer, training = counting(running, 0, strategy)
        add(model, optimizer, 3, 1.0, 1.0)
        tell = training._tell

        def flush_and_lose_a_server(event: Event) -> None:
            assert isinstance(event, DataEnd)
            training._tell = tell  # type: ignore[method-assign]  # as it was
            training.flush()
            running.threads[1].abandon()
            training._joined().tell("leave")

        training._tell = flush_and_lose_a_server  # type: ignore[method-assign]  # it dies in between
        with pytest.raises(WorkerFailed, match="server 1: has been silent for 1 s"):
            together(training.finish)
        assert running.threads[0].server.report.updates == 1
