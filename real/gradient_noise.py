"""Gradient noise: distances of batches' gradients from their mean.

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

    Call ``add`` after each backward, then ``measured`` once. It keeps a copy of the gradients, on the host.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], communicators: Communicators) -> None:
        self._parameters, self._communicators = parameters, communicators
        self._sums = [torch.zeros_like(parameter, device="cpu", requires_grad=False) for parameter in parameters]
        self._square, self._steps = 0.0, 0

    @torch.no_grad()
    def add(self) -> None:
        """Add this step's gradients."""
        self._steps += 1
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad.cpu())
                self._square += _square_of(parameter.grad)

    def measured(self) -> dict[str, Any] | None:
        """Return fields of ``fleetbench.measurements.GradientNoise``, or ``None`` if a trainer diverged.

        Every trainer calls it, and gets the same result.
        """
        trainers, batches, device = self._communicators.trainers, self._steps * self._communicators.trainers, self._communicators.device
        square = torch.tensor([self._square / self._steps], dtype=torch.float64, device=device)
        means = [total.to(device) / self._steps for total in self._sums]
        for tensor in (square, *means) if trainers > 1 else ():
            self._communicators.all_reduce(tensor, "mean")
        of_mean = sum(map(_square_of, means))
        # variance of the gradient of one trainer's batch
        variance = (float(square) - of_mean) * batches / max(1, batches - 1)
        signal = of_mean - variance / batches
        if not math.isfinite(signal):
            return None
        return {"steps": self._steps, "scale": variance / signal / trainers if signal > variance / batches else None}


def _square_of(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
