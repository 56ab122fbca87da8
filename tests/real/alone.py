"""One trainer without processes: what an engine, a save and a load need of others, answered here."""

from __future__ import annotations

from typing import Self

import torch
from torch import nn
from zero_trainer import ZeroTrainer

from fleetbench.strategy import DistributedStrategy
from real.checkpoints.meeting import Meeting
from real.engine.engine import Engine


class AloneTrainer(ZeroTrainer):
    """Communicators of one trainer."""

    trainers = 1

    def part(self, group: str) -> tuple[int, ...]:  # noqa: ARG002  # see ZeroTrainer
        """See ``Communicators``."""
        return (0,)

    def barrier(self) -> None:
        """See ``Communicators``."""


class AloneMeeting(Meeting):
    """Everybody who meets is here."""

    rank = 0
    trainers = 1

    def __init__(self) -> None:  # no process group
        """See ``Meeting``."""


class Training:
    """A model under a strategy, trained by one trainer; a context that closes the engine."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **fields: object) -> None:
        self.model = model
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.communicators = AloneTrainer()
        self.engine = Engine(model, DistributedStrategy(**fields), self.communicators)  # type: ignore[arg-type]  # the fake has what the engine calls
        self.engine.attach_optimizer(self.optimizer)

    def step(self, *inputs: torch.Tensor) -> None:
        """One step of the usual loop."""
        self.model(*inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.communicators.close()
