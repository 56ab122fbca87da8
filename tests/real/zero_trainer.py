"""Another trainer that is no process: it answers the engine's collectives here, so that an engine can be tested alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import collective_errors
from real.communication.lanes import Lane, Started, ThreadLane
from real.engine.engine import Engine


class ZeroTrainer:
    """Stands in for ``Communicators``: one other trainer, whose tensors are all zeros.

    An average halves; ``flights`` keeps ``(communicator, start, end)`` of every collective. As gloo does, it
    carries two of a communicator at once, first in, first out.
    """

    trainers = 2
    rank = 0
    queue_depth = 2
    device = torch.device("cpu")
    workers = None
    errors = staticmethod(collective_errors)

    def __init__(self, delay_s: float = 0.0) -> None:
        self.flights: list[tuple[int, float, float]] = []
        self.answers: dict[int, torch.Tensor] = {}
        self._delay_s = delay_s
        self._lanes: list[Lane] = []
        self._carriers: list[ThreadPoolExecutor] = []
        self._in_turn = ThreadPoolExecutor(1)
        self._update_lane: Lane | None = None
        self._lock = threading.Lock()

    def require(self, number: int, groups: object = None) -> None:  # noqa: ARG002  # there is only one other trainer to meet
        """See ``Communicators``."""
        while len(self._lanes) < number:
            self._lanes.append(ThreadLane(f"lane-{len(self._lanes)}"))
            self._carriers.append(ThreadPoolExecutor(max_workers=self.queue_depth))

    @property
    def beside(self) -> dist.ProcessGroup:
        """See ``Communicators``."""
        return self.world

    @cached_property
    def world(self) -> dist.ProcessGroup:
        """This process's own: DistributedDataParallel wants one, and exchanges flags of unused parameters in it."""
        group = dist.ProcessGroup(dist.HashStore(), 0, 1)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(self.device, dist.ProcessGroup.BackendType.CUSTOM, FakeProcessGroup._create_internal(0, 1))
        return group

    @property
    def in_turn(self) -> int:
        """See ``Communicators``."""
        return -1

    def lane(self, communicator: int) -> Lane:
        """See ``Communicators``."""
        return self._lanes[communicator]

    @property
    def update_lane(self) -> Lane:
        """See ``Communicators``."""
        if self._update_lane is None:
            self._update_lane = ThreadLane("update")
        return self._update_lane

    def prove(self, together: int, *, beside: bool = False) -> None:
        """See ``Communicators``."""

    def order_lanes(self) -> None:
        """See ``Communicators``."""

    def part(self, group: str) -> tuple[int, ...]:  # noqa: ARG002  # see require
        """See ``Communicators``."""
        return (0, 1)

    def start_average(self, tensor: torch.Tensor, communicator: int, ended: Callable[[], None] | None, group: str = "world") -> Started:
        """See ``Communicators``."""

        def carry() -> None:
            try:
                self.all_reduce(tensor, "mean", group, max(communicator, 0))
            finally:
                if ended is not None:
                    ended()

        carrier = self._in_turn if communicator == self.in_turn else self._carriers[communicator]
        return _Carried(carrier.submit(carry))

    def all_reduce(self, tensor: torch.Tensor, operator: str, group: str, communicator: int) -> None:  # noqa: ARG002  # see require
        """Halve a mean: the other trainer adds nothing."""
        begin = time.monotonic()
        time.sleep(self._delay_s)
        if operator == "mean":
            tensor.div_(2)
        with self._lock:
            self.flights.append((communicator, begin, time.monotonic()))

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: str, communicator: int) -> None:  # noqa: ARG002  # see require
        """What trainers tell one another: the other trainer tells the same."""
        whole.copy_(own.repeat(self.trainers))

    def broadcast(self, *tensors: torch.Tensor, source: int = 0) -> None:
        """Rank 0 is this one: nothing changes."""

    def close(self) -> None:
        """See ``Communicators``."""
        for lane in (*self._lanes, *((self._update_lane,) if self._update_lane else ())):
            lane.close()
        for carrier in (*self._carriers, self._in_turn):
            carrier.shutdown()


class _Carried:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def is_done(self) -> bool:
        return self._future.done()


def six_layers() -> nn.Module:
    """A model of six layers of 8 by 8."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def engine_of(model: nn.Module, others: ZeroTrainer, **fields: object) -> tuple[Engine, torch.optim.Optimizer]:
    """An engine of a strategy with these fields, and the optimizer that it controls."""
    engine = Engine(model, DistributedStrategy(**fields), others)  # type: ignore[arg-type]  # the fake has the methods that the engine calls
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    return engine, optimizer


def train(engine: Engine, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """The usual loop."""
    for _ in range(steps):
        engine.model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
