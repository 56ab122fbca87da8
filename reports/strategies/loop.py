"""What every arm is: a loop of its own with one ``step``, or the reason why it cannot run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class SkippedArm(Exception):  # noqa: N818  # an arm that cannot run here is no error
    """Why an arm cannot run on this machine."""


class Arm(Protocol):
    """One way to train."""

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """One forward and backward, and the update where it is due."""
        ...

    def finish(self) -> None:
        """No step follows: every rank's parameters are the trained ones."""
        ...

    def close(self) -> None:
        """Remove what the arm hung on the model."""
        ...


@dataclass(slots=True)
class Plain:
    """A model and its optimizer without any exchange, or with one that the model or the optimizer brings along."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    set_to_none: bool = True

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """See ``Arm``."""
        cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def finish(self) -> None:
        """See ``Arm``."""

    def close(self) -> None:
        """See ``Arm``."""
