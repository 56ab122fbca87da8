"""Gradient noise: how far the gradients of batches, and trainers that exchange nothing, are from their means.

The noise scale is the simple one of McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162, appendix A.1),
from squares of gradients of one batch and of the mean over all batches of all steps, as if parameters stood still in the meantime.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from real.communication.communicators import Communicators


class GradientNoise:
    """Of some steps from common parameters. ``add`` after each backward, then ``measured`` once; both keep a copy of the parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], communicators: Communicators) -> None:
        self._parameters, self._communicators = parameters, communicators
        self._begin = [parameter.detach().clone() for parameter in parameters]
        self._sums = [torch.zeros_like(parameter) for parameter in self._begin]
        self._square, self._steps = torch.zeros((), dtype=torch.float64, device=communicators.device), 0

    @torch.no_grad()
    def add(self) -> None:
        """The gradients of a step, which are there."""
        self._steps += 1
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad)
                self._square += parameter.grad.double().square().sum()

    @torch.no_grad()
    def measured(self) -> dict[str, Any]:
        """Fields of ``fleetbench.measurements.GradientNoise``; every trainer calls it, and has the same."""
        trainers, batches = self._communicators.trainers, self._steps * self._communicators.trainers
        own = self._square.new_zeros(2)  # squares of a gradient, and of how far this trainer is from the middle of all
        own[0] = self._square / self._steps
        joint = self._square.new_zeros(2)  # of the mean gradient, and of how far that middle has gone
        for parameter, begin, total in zip(self._parameters, self._begin, self._sums, strict=True):
            gone, mean = parameter.detach() - begin, total / self._steps
            middle = gone.clone()
            for tensor in (mean, middle) if trainers > 1 else ():
                self._communicators.all_reduce(tensor, "mean")
            joint += torch.stack([mean.double().square().sum(), middle.double().square().sum()])
            own[1] += (gone - middle).double().square().sum()
        if trainers > 1:
            self._communicators.all_reduce(own, "mean")
        (square, apart), (of_mean, way) = own.tolist(), joint.tolist()
        variance = (square - of_mean) * batches / max(1, batches - 1)  # of the gradient of one trainer's batch
        signal = of_mean - variance / batches
        scale = variance / signal / trainers if signal > variance / batches else None
        return {"steps": self._steps, "scale": scale, "drift": (apart / way) ** 0.5 if way else 0.0}
