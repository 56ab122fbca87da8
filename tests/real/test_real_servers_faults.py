"""Faults of a job with parameter servers on real connections: whoever fails is named, and all others end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from server_job import PATIENCE_S, SYNCHRONOUS, Job, ServerThread, add_gradients, dice, free_port, job, served, together
from test_real_servers_training import add, counting

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from fleetbench.strategy import ASyncConfigs, DistributedStrategy
from real.servers.leg_servers import LegServers
from real.servers.links import Options
from real.servers.served_training import ServedTraining

ASYNCHRONOUS = DistributedStrategy(mode="ps", a_sync=True, a_sync_configs=ASyncConfigs(k_steps=0))
MODES = {"asynchronous": served(), "geo_sgd": served(1), "synchronous": SYNCHRONOUS}


def until(condition: Callable[[], object]) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)


def keep_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, training: ServedTraining, steps: int) -> None:
    """Train and exchange."""
    for _ in range(steps):
        add(model, optimizer, 0, 1.0, 1.0)
        training.flush()


def still_serves(running: Job) -> None:
    """A trainer joins, trains and leaves."""
    model, optimizer, training = counting(running, 0, served())
    add(model, optimizer, 1, 2.0, 1.0)
    training.finish()
    running.reports()
    assert torch.equal(running.table()[1], torch.full((2,), -2.0))


def test_garbage_on_the_port_does_not_stop_the_service() -> None:
    """Random bytes, half a handshake and a page request end with their connections."""
    with job() as running:
        host, _, port = running.endpoints[0].partition(":")
        for text in (dice(1).randbytes(4096), b"\xff\x00\x00\x00", b"GET / HTTP/1.1\r\n\r\n", b""):
            with socket.create_connection((host, int(port)), timeout=5) as stranger:
                stranger.sendall(text)
        still_serves(running)


@pytest.mark.parametrize("strategy", MODES.values(), ids=MODES)
def test_a_trainer_that_dies_ends_the_job_by_name(strategy: DistributedStrategy) -> None:
    """At once: the servers, and the trainer that trains on or waits for a round, end with the rank whose connection has broken."""
    strategy = strategy.replace(a_sync_configs=ASyncConfigs(k_steps=strategy.a_sync_configs.k_steps))
    with job(2, 2) as running:
        begin = time.monotonic()

        def lonely() -> None:
            model, optimizer, training = counting(running, 0, strategy)
            with pytest.raises(WorkerFailed, match="rank 1: its connection has broken"):
                keep_on(model, optimizer, training, 10**6)

        def dying() -> None:
            _, _, training = counting(running, 1, strategy)
            training.close()  # its process is gone, without a word

        together(lonely, dying)
        running.reports()
        assert [getattr(thread.error, "where", None) for thread in running.threads] == ["rank 1"] * 2
        assert time.monotonic() - begin < PATIENCE_S / 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", MODES.values(), ids=MODES)
def test_a_server_that_dies_is_named(strategy: DistributedStrategy) -> None:
    """At once: its connection breaks, long before anybody would call it silent."""
    with job(2, 1) as running:
        model, optimizer, training = counting(running, 0, strategy)
        add(model, optimizer, 0, 1.0, 1.0)
        training.flush()
        begin = time.monotonic()
        running.threads[1].abandon()
        with pytest.raises(WorkerFailed, match="server 1: its connection has broken") as raised:
            keep_on(model, optimizer, training, 10**6)
        assert running.endpoints[1] in str(raised.value)
        assert time.monotonic() - begin < PATIENCE_S / 2


@pytest.mark.slow
def test_a_server_that_is_stopped_is_named(tmp_path: Path) -> None:
    """Its process lives and its connections hold, but no heartbeat is answered any more."""
    endpoint = f"127.0.0.1:{free_port()}"
    servers = LegServers(tmp_path / "leg", tmp_path, [endpoint], environment={}, trainers=1, timeout_s=3.0, startup_timeout_s=PATIENCE_S)
    servers.start()
    model = torch.nn.Linear(2, 1)
    training = ServedTraining(model, served(), Options(number=0, endpoints=(endpoint,), timeout_s=3.0))
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        training.attach_optimizer(optimizer)
        training.begin()
        os.kill(servers._processes[0].popen.pid, signal.SIGSTOP)
        begin = time.monotonic()

        def train_on() -> None:
            while True:
                add_gradients(model, 1.0)
                optimizer.step()
                training.flush()

        with pytest.raises(WorkerFailed, match="server 0: its connection has broken, or it was silent for 3 s"):
            train_on()
        assert 2.0 < time.monotonic() - begin < PATIENCE_S
    finally:
        training.close()
        servers.kill()


def test_a_barrier_of_asynchronous_training_has_no_limit() -> None:
    """A server that lets a trainer wait for another one says that it lives, however little patience the trainer has."""
    with job(1, 2) as running:
        trainings: dict[int, ServedTraining] = {}
        together(*(lambda rank=rank: trainings.update({rank: counting(running, rank, served())[2]}) for rank in range(2)))  # type: ignore[misc]  # a default binds the loop's variable
        trainings[0]._links._patience_s = 1.2

        def late() -> None:
            time.sleep(3.0)
            trainings[1].barrier()

        together(trainings[0].barrier, late)


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


def test_servers_that_never_come_are_named() -> None:
    """A trainer that finds nobody says whom it missed, after its startup timeout."""
    with job(2, 1, startup_timeout_s=1.0) as running, pytest.raises(WorkerFailed, match="server 1: has not answered within 1 s"):
        counting(running, 0, served(), endpoints=[running.endpoints[0], "127.0.0.1:9"])


@pytest.mark.slow
def test_trainers_without_the_first_do_not_wait_for_ever() -> None:
    """Nobody brings the parameters: the second trainer says so after the startup timeout."""
    with job(1, 2, startup_timeout_s=1.0) as running, pytest.raises(WorkerFailed, match=r"(trainer|rank) 0"):
        counting(running, 1, served())


def test_two_servers_cannot_have_one_address() -> None:
    """The second says that the address is taken."""
    with job() as running:
        options = Options(number=0, endpoints=running.endpoints)
        with pytest.raises(EnvironmentLacks, match="address cannot be taken"):
            ServerThread(options)


def test_a_trainer_that_never_comes_is_named() -> None:
    """The server waits for it for the startup timeout; rank 0 stands at the launch's barrier."""
    with job(1, 2, startup_timeout_s=1.0) as running, pytest.raises(WorkerFailed, match="rank 1: this trainer has never come"):
        counting(running, 0, SYNCHRONOUS)


def test_a_trainer_that_lives_and_does_not_come_ends_synchronous_training() -> None:
    """Rank 0 waits for rank 1's second gradient for longer than a round may take."""
    with job(1, 2, startup_timeout_s=5.0, round_timeout_s=1.0) as running:
        is_over = threading.Event()

        def waits() -> None:
            model, optimizer, _ = counting(running, 0, SYNCHRONOUS)
            add(model, optimizer, 0, 1.0, 1.0)
            begin = time.monotonic()
            with pytest.raises(WorkerFailed, match="rank 1: this trainer has let the others wait for 1 s"):
                add(model, optimizer, 0, 1.0, 1.0)
            is_over.set()
            assert 1.0 < time.monotonic() - begin < 4.0

        def stays_away() -> None:
            model, optimizer, _ = counting(running, 1, SYNCHRONOUS)
            add(model, optimizer, 0, 1.0, 1.0)
            assert is_over.wait(PATIENCE_S)

        together(waits, stays_away)
        assert running.dense().tolist() == [-1.0] * 3
