"""Servers on threads of the test's own process, and trainers that join them."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fleetbench.staleness import ServerLoad
from fleetbench.strategy import ASyncConfigs, DistributedStrategy
from real.servers.links import Options
from real.servers.served_training import ServedTraining
from real.servers.server import ParameterServer

PATIENCE_S = 20.0


def dice(seed: int) -> random.Random:
    """Chance that comes out the same every time."""
    return random.Random(seed)  # noqa: S311  # no secret


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def add_gradients(model: torch.nn.Module, value: float) -> None:
    """Give every parameter a gradient of so much in every number."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


class ServerThread(threading.Thread):
    """One server, run to its end."""

    def __init__(self, options: Options, *, restore: Path | None = None) -> None:
        super().__init__(daemon=True)
        self.server = ParameterServer(options)
        self.report: ServerLoad | None = None
        self.error: Exception | None = None
        try:
            if restore is not None:
                self.server.restore(restore)
            self.server.bind()
        except Exception:
            self.server.close()
            raise

    def run(self) -> None:
        """Serve."""
        try:
            self.report = self.server.run()
        except Exception as error:  # noqa: BLE001  # the test looks at it
            self.error = error
        finally:
            self.server.close()

    def abandon(self) -> None:
        """End at once, as if killed: nothing is saved, nobody is told."""
        self.server._has_ended = True
        self.join(PATIENCE_S)
        assert not self.is_alive()


class Job:
    """Servers and the options with which trainers find them."""

    def __init__(
        self,
        num_servers: int,
        trainers: int,
        **options: Any,
    ) -> None:
        self.num_servers, self.trainers = num_servers, trainers
        self.options = {"timeout_s": PATIENCE_S, "startup_timeout_s": PATIENCE_S, **options}
        self.endpoints = tuple(f"127.0.0.1:{free_port()}" for _ in range(num_servers))
        self.threads = [self.start(number) for number in range(num_servers)]
        self.trainings: list[ServedTraining] = []

    def start(self, number: int, **run: Any) -> ServerThread:
        """One server, on its address."""
        options = Options(number=number, endpoints=self.endpoints, trainers=self.trainers, record=True, **self.options)
        thread = ServerThread(options, **run)
        thread.start()
        return thread

    def trainer(
        self,
        rank: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: DistributedStrategy,
        *,
        endpoints: Sequence[str] | None = None,
        **links: Any,
    ) -> ServedTraining:
        """A trainer that has joined."""
        own = {**self.options, "trainers": self.trainers, "record": True, **links}
        training = ServedTraining(model, strategy, Options(number=rank, endpoints=tuple(endpoints or self.endpoints), **own))
        training.attach_optimizer(optimizer)
        self.trainings.append(training)
        training.begin()
        return training

    def reports(self) -> list[ServerLoad]:
        """What the servers did, once they have ended by themselves."""
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a server has not ended"
        return [thread.report for thread in self.threads if thread.report is not None]

    def dense(self) -> torch.Tensor:
        """The servers' dense parameters, in the model's order."""
        return torch.cat([torch.from_numpy(thread.server.shard.dense) for thread in self.threads if thread.server.shard is not None])

    def table(self, number: int = 0) -> torch.Tensor:
        """A table, from all servers."""
        parts = [thread.server.shard.tables[number] for thread in self.threads if thread.server.shard is not None]
        whole = torch.zeros(sum(map(len, parts)), parts[0].shape[1], dtype=torch.from_numpy(parts[0]).dtype)
        for server, part in enumerate(parts):
            whole[server :: self.num_servers] = torch.from_numpy(part)
        return whole


@contextmanager
def job(num_servers: int = 1, trainers: int = 1, **options: Any) -> Iterator[Job]:
    """Servers that have ended after it, and trainers that have let go."""
    running = Job(num_servers, trainers, **options)
    try:
        yield running
    finally:
        for training in running.trainings:
            training.close()
        for thread in running.threads:
            if thread.is_alive():
                thread.abandon()


def together(*tasks: Callable[[], None]) -> None:
    """Run tasks on threads, and raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
        assert not thread.is_alive(), "a trainer hangs"
    if errors:
        raise errors[0]


def served(k_steps: int = 0, **configs: Any) -> DistributedStrategy:
    """Asynchronous, or with ``k_steps`` above 0 GeoSGD. Trainers of one thread join one after the other."""
    return DistributedStrategy(mode="ps", a_sync=True, a_sync_configs=ASyncConfigs(k_steps=k_steps, launch_barrier=False, **configs))


SYNCHRONOUS = DistributedStrategy(mode="ps")
