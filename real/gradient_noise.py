"""Gradient noise: distances of batches' gradients, and of trainers without exchange, from their means.

The noise scale is the simple one of McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv
1812.06162, appendix A.1). It compares the squared gradient of one batch with that of the mean over all
batches of all steps, as if parameters did not change in the meantime.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from real.communication.communicators import Communicators


class GradientNoise:
    """Measures gradient noise over some steps, which all trainers start with the same parameters.

    Call ``add`` after each backward, then ``measured`` once. It keeps two copies of the parameters, on the
    host.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], communicators: Communicators) -> None:
        self._parameters, self._communicators = parameters, communicators
        self._begin = [parameter.detach().cpu().clone() for parameter in parameters]
        self._sums = [torch.zeros_like(parameter) for parameter in self._begin]
        self._square, self._steps = 0.0, 0

    @torch.no_grad()
    def add(self) -> None:
        """Add this step's gradients."""
        self._steps += 1
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad.cpu())
                self._square += _square_of(parameter.grad)

    @torch.no_grad()
    def measured(self) -> dict[str, Any] | None:
        """Return fields of ``fleetbench.measurements.GradientNoise``, or ``None`` if a trainer diverged.

        Every trainer calls it, and gets the same result.
        """
        trainers, batches, device = self._communicators.trainers, self._steps * self._communicators.trainers, self._communicators.device
        # squared norms: this trainer's distance from the mean of all, the mean gradient, the distance that the mean moved
        apart = of_mean = way = 0.0
        for parameter, begin, total in zip(self._parameters, self._begin, self._sums, strict=True):
            gone, mean = parameter.detach() - begin.to(device), total.to(device) / self._steps
            middle = gone.clone()
            for tensor in (mean, middle) if trainers > 1 else ():
                self._communicators.all_reduce(tensor, "mean")
            apart, of_mean, way = apart + _square_of(gone - middle), of_mean + _square_of(mean), way + _square_of(middle)
        means = torch.tensor([self._square / self._steps, apart], dtype=torch.float64, device=device)
        if trainers > 1:
            self._communicators.all_reduce(means, "mean")
        square, apart = means.tolist()
        if not all(map(math.isfinite, (square, apart, of_mean, way))):
            return None
        # variance of the gradient of one trainer's batch
        variance = (square - of_mean) * batches / max(1, batches - 1)
        signal = of_mean - variance / batches
        scale = variance / signal / trainers if signal > variance / batches else None
        return {"steps": self._steps, "scale": scale, "drift": (apart / way) ** 0.5 if way else 0.0}


def _square_of(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
