"""Small training problems whose batches every rank, and a single process, can make for themselves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = 10
"""One step into a round of four."""
BATCH = 8
LR = 0.05
DECAY_STEP = 4
"""From here on the learning rate is a tenth."""
FEATURES = 12
CLASSES = 5
ROWS = 9

Batch = tuple[torch.Tensor, torch.Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Odd(nn.Module):
    """What trips up a reducer: batch norm, types mixed, a parameter that is a view of a buffer, one that is empty."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        other = torch.float32 if dtype == torch.float64 else torch.float64
        whole = torch.linspace(0.1, 0.6, 6, dtype=dtype)
        self.register_buffer("whole", whole)
        self.shift = nn.Parameter(whole[1:4])
        self.first = nn.Linear(FEATURES, 40, dtype=dtype)
        self.norm = nn.BatchNorm1d(40, dtype=dtype)
        self.second = nn.Linear(40, 3, dtype=dtype)
        self.empty = nn.Parameter(torch.empty(0, dtype=dtype))
        self.gain = nn.Parameter(torch.ones(33, dtype=other))
        self.third = nn.Linear(3, 33, dtype=dtype)
        self.last = nn.Linear(33, CLASSES, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores ``(batch, classes)``."""
        x = self.second(torch.tanh(self.norm(self.first(x)))) + self.shift + 0.01 * self.whole.sum()
        x = torch.tanh(self.third(x) * self.gain.to(x.dtype))
        return self.last(x) + self.empty.sum()  # type: ignore[no-any-return]  # a module's call is untyped


class Gated(nn.Module):
    """One of two branches by the step and the rank, and a third that every other step reaches on no rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 10, dtype=dtype)
        self.branches = nn.ModuleList(nn.Linear(10, 6, dtype=dtype) for _ in range(2))
        self.rare = nn.Linear(6, 6, dtype=dtype)
        self.last = nn.Linear(6, CLASSES, dtype=dtype)
        self.turn = 0
        self.rank = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores ``(batch, classes)``; counts its calls."""
        self.turn += 1
        x = self.branches[(self.turn + self.rank) % 2](torch.tanh(self.first(x)))
        if self.turn % 2:
            x = self.rare(x)
        return self.last(x)  # type: ignore[no-any-return]  # a module's call is untyped


class Looked(nn.Module):
    """An embedding with sparse gradients, of which every rank touches other rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, sparse=True, dtype=dtype)
        self.last = nn.Linear(4, CLASSES, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores ``(batch, classes)`` of samples whose features are read as rows."""
        rows = (x[:, :2].abs() * 3).long() % ROWS
        return self.last(self.table(rows).sum(dim=1))  # type: ignore[no-any-return]  # a module's call is untyped


def model(dtype: str, kind: str = "plain") -> nn.Module:
    """A model with initial parameters that are always the same; ``plain`` has unequal layers, so that buckets are unequal."""
    number = getattr(torch, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if kind == "plain":
            sizes = [(FEATURES, 40), (40, 7), (7, 33), (33, CLASSES)]
            layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())][:-1]
            return nn.Sequential(*layers).to(number)
        if kind == "normed":
            return nn.Sequential(nn.Linear(FEATURES, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, CLASSES)).to(number)
        return {"odd": Odd, "gated": Gated, "looked": Looked}[kind](number)


def joint_batch(step: int, ranks: int, dtype: str) -> Batch:
    """The batch of all ranks at a step, ranks one after another."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(ranks * BATCH, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (ranks * BATCH,), generator=generator)
    return inputs.to(getattr(torch, dtype)), labels


def own_batch(step: int, rank: int, ranks: int, dtype: str) -> Batch:
    """One rank's part of the joint batch."""
    inputs, labels = joint_batch(step, ranks, dtype)
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    return inputs[mine], labels[mine]


@functools.cache
def optimizer_of(name: str) -> MakeOptimizer:
    """An optimizer by name: ``sgd``, ``momentum`` (with weight decay), ``adam``."""
    makers: dict[str, MakeOptimizer] = {
        "sgd": lambda network: torch.optim.SGD(network.parameters(), lr=LR),
        "momentum": lambda network: torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9, weight_decay=1e-3),
        "adam": lambda network: torch.optim.Adam(network.parameters(), lr=LR / 10, weight_decay=1e-3),
    }
    return makers[name]


def decay(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The schedule of the learning rate, told before every step."""
    if step == DECAY_STEP:
        for group in optimizer.param_groups:
            group["lr"] *= 0.1


def flat(network: nn.Module) -> torch.Tensor:
    """All parameters as one vector of float64."""
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in network.parameters()])


@functools.cache
def joint_training(
    ranks: int, dtype: str, make: MakeOptimizer, kind: str = "plain", merge: int = 1, *, average: bool = True
) -> torch.Tensor:
    """``(steps, parameters)``: one process trains on the joint batches; ``merge`` of them share an update."""
    network = model(dtype, kind)
    optimizer = make(network)
    history = []
    for step in range(1, STEPS + 1):
        decay(optimizer, step)
        inputs, labels = joint_batch(step, ranks, dtype)
        loss = cross_entropy(network(inputs), labels)
        (loss / merge if average else loss).backward()
        if step % merge == 0:
            optimizer.step()
            optimizer.zero_grad()
        history.append(flat(network))
    return torch.stack(history)


class Schedule:
    """When trainers average: at the updates named, or after K of them, K following the averaged loss."""

    def __init__(self, updates: set[int] | None = None, k: int = 1, begin: int = 1) -> None:
        self._updates = updates
        self._k = self._k0 = k
        self._begin = begin
        self._last = 0
        self._loss0 = self._lr0 = 0.0

    def meets(self, update: int) -> bool:
        """Whether trainers average after ``update``."""
        if self._updates is not None:
            return update in self._updates
        return update <= self._begin or update - self._last == self._k

    def met(self, update: int, loss: float, lr: float) -> None:
        """They have; Fleet's rule gives the next K."""
        self._last = update
        if update == 1:
            self._loss0, self._lr0 = loss, lr
        elif update > self._begin:
            self._k = max(1, min(16, math.ceil(math.sqrt(self._lr0 * loss / (lr * self._loss0) * self._k0))))


def local_training(
    ranks: int,
    dtype: str,
    make: MakeOptimizer,
    schedule: Schedule,
    *,
    kind: str = "plain",
    merge: int = 1,
    state: str = "local",
    buffers: bool = False,
) -> torch.Tensor:
    """``(ranks, steps, parameters)``: Local SGD written out in one process, a network and an optimizer a rank.

    ``state``: what happens to the optimizer's state at an averaging: ``local``, ``reset``, ``average``.
    """
    networks = [model(dtype, kind) for _ in range(ranks)]
    optimizers = [make(network) for network in networks]
    histories: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for step in range(1, STEPS + 1):
        losses = []
        for rank, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            decay(optimizer, step)
            inputs, labels = own_batch(step, rank, ranks, dtype)
            loss = cross_entropy(network(inputs), labels)
            losses.append(float(loss.detach()))
            (loss / merge).backward()
            if step % merge == 0:
                optimizer.step()
                optimizer.zero_grad()
        update = step // merge
        if step % merge == 0 and schedule.meets(update):
            _average_into([list(network.parameters()) for network in networks])
            if buffers:
                _average_into([[buffer for buffer in network.buffers() if buffer.is_floating_point()] for network in networks])
            _treat_state(optimizers, state)
            schedule.met(update, sum(losses) / ranks, optimizers[0].param_groups[0]["lr"])
        for network, history in zip(networks, histories, strict=True):
            history.append(flat(network))
    return torch.stack([torch.stack(history) for history in histories])


@torch.no_grad()
def _average_into(replicas: list[list[torch.Tensor]]) -> None:
    for tensors in zip(*replicas, strict=True):
        mean = torch.stack([tensor.detach() for tensor in tensors]).mean(dim=0)
        for tensor in tensors:
            tensor.copy_(mean)


def _treat_state(optimizers: list[torch.optim.Optimizer], policy: str) -> None:
    replicas = [
        [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        for optimizer in optimizers
    ]
    if policy == "average":
        _average_into(replicas)
    elif policy == "reset":
        for tensors in replicas:
            for tensor in tensors:
                tensor.zero_()
