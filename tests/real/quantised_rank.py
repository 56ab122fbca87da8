"""One rank of a quantised mean: ``quantised_rank.py RANK RANKS STORE OUTPUT``.

Saves, for every case of ``cases``, the mean under its name; the bytes that the rank handed to collectives for others
under ``NAME/bytes``; and of the case with error feedback every round's mean and what is left.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from deferred import BACKEND, FakeStreams, StreamOrder, register

from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from real.communication.communicators import Communicators
from real.communication.quantised import average_quantised
from real.engine.engine import Engine

SIZES = (1, 7, 255, 256, 257, 1024, 3 * 1024 + 5, 20_000)
ROUNDS = 40
TRAINED, UPDATES = 500, 6
OUTER: dict[str, Any] = {
    "k_steps": 2, "schedule": "torch", "begin_step": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "outer_wire": "int8"
}  # fmt: skip
BAD = {"nan": (300, np.nan), "infinity": (700, np.inf), "minus infinity": (1500, -np.inf)}
"""At which place the last rank has it."""
BAD_SIZE = 2000


def numbers(rank: int, size: int) -> npt.NDArray[np.float32]:
    """What a rank brings: of very different sizes in different blocks, one block of zeros, and one that FP32 hardly holds."""
    drawn = np.random.default_rng([rank, size]).standard_normal(size)
    drawn *= 10.0 ** np.random.default_rng(size).integers(-6, 3, -(-size // 256)).repeat(256)[:size]
    drawn[512:768] = 0.0
    drawn[1024:1280] *= 1e-38
    return drawn.astype(np.float32)


def bad(rank: int, ranks: int, name: str) -> npt.NDArray[np.float32]:
    """Numbers of which the last rank's hold one that is not finite."""
    brought = numbers(rank, BAD_SIZE)
    if rank == ranks - 1:
        brought[BAD[name][0]] = BAD[name][1]
    return brought


def average(tensor: torch.Tensor, communicators: Communicators, residual: torch.Tensor | None = None) -> None:
    """On the first communicator, untimed."""
    average_quantised(tensor, communicators, 0, lambda _name: nullcontext(), residual)


class Given(torch.nn.Module):
    """A parameter whose gradient is given."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(TRAINED))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        return (self.values * gradient).sum()


def train(communicators: Communicators, *, feeds_back: bool) -> npt.NDArray[np.float32]:
    """The parameter after every round of two updates with an outer optimizer, by the engine."""
    model = Given()
    configs = LocalSGDConfigs(**OUTER, outer_error_feedback=feeds_back)
    engine = Engine(model, DistributedStrategy(localsgd=True, localsgd_configs=configs), communicators)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine.attach_optimizer(optimizer)
    found = []
    for update in range(UPDATES):
        model(torch.from_numpy(numbers(communicators.rank + 10 * update, TRAINED))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if update % 2:
            found.append(model.values.detach().clone())
    engine.close()
    return torch.stack(found).numpy()


class Counter:
    """Counts the bytes that this rank's collectives send to others."""

    def __init__(self, communicators: Communicators) -> None:
        self.sent = 0
        self._ranks, self._all_to_all, self._all_gather = communicators.trainers, communicators.all_to_all, communicators.all_gather
        communicators.all_to_all = self.all_to_all  # type: ignore[method-assign]  # stands in between
        communicators.all_gather = self.all_gather  # type: ignore[method-assign]

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, communicator: int) -> None:
        """All but the rank's own piece leaves."""
        self.sent += sent.nbytes // self._ranks * (self._ranks - 1)
        self._all_to_all(received, sent, communicator)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: str, communicator: int) -> None:
        """The rank's own piece leaves to, or over, all others."""
        self.sent += own.nbytes * (self._ranks - 1)
        self._all_gather(whole, own, group, communicator)


def main() -> None:
    """Every case in turn."""
    rank, ranks, store, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    saved: dict[str, Any] = {}
    communicators = Communicators("gloo", timedelta(seconds=60))
    for size in SIZES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensor = torch.from_numpy(numbers(rank, size)).to(dtype)
            average(tensor, communicators)
            saved[f"{size} {dtype}"] = tensor.double().numpy()
    for name in BAD:
        tensor = torch.from_numpy(bad(rank, ranks, name))
        average(tensor, communicators)
        saved[name] = tensor.numpy()
    residual, means = torch.zeros(SIZES[-1]), []
    for _ in range(ROUNDS):
        means.append(torch.from_numpy(numbers(rank, SIZES[-1])))
        average(means[-1], communicators, residual)
    saved["feedback"], saved["residual"] = torch.stack(means).numpy(), residual.numpy()
    saved["trained"] = train(communicators, feeds_back=False)
    saved["trained, fed back"] = train(communicators, feeds_back=True)
    counter = Counter(communicators)
    for size in SIZES:
        before = counter.sent
        average(torch.zeros(size), communicators)
        saved[f"{size} bytes"] = np.array(counter.sent - before)
    communicators.close()
    streams = FakeStreams()
    register(streams)
    with StreamOrder(streams):
        deferred = Communicators(BACKEND, timedelta(seconds=60), torch.device("cpu"))
        tensor = torch.from_numpy(numbers(rank, SIZES[-1]))
        average(tensor, deferred)
    saved["deferred"] = tensor.numpy()
    np.savez(output, **saved)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
