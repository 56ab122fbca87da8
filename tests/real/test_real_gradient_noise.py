"""Gradient noise, against what follows from the law of the data."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
from torch import nn

from fleetbench.measurements import GradientNoise as Found
from real.communication.communicators import Communicators
from real.gradient_noise import GradientNoise

SIZE, STEPS, LR, SD, BATCH = 200, 60, 1e-4, 3.0, 4


class Among:
    """Communicators of threads."""

    device = torch.device("cpu")

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self._barrier, self._tensors = threading.Barrier(trainers), list[torch.Tensor]()

    def all_reduce(self, tensor: torch.Tensor, operator: str) -> None:
        """Mean."""
        assert operator == "mean"
        self._tensors.append(tensor.clone())
        self._barrier.wait()
        tensor.copy_(torch.stack(self._tensors).mean(0))
        if self._barrier.wait() == 0:
            self._tensors.clear()
        self._barrier.wait()


def measured(trainers: int, distance: float) -> Found:
    """Every trainer's step goes to the mean of a batch of normal vectors, whose middle is ``distance`` away: loss = |w - x|^2 / 2."""
    among, found = Among(trainers), dict[int, dict[str, Any]]()

    def train(rank: int) -> None:
        random = torch.Generator().manual_seed(rank)
        parameters = [nn.Parameter(torch.full((size,), distance / SIZE**0.5)) for size in (SIZE // 4, SIZE - SIZE // 4)]
        noise = GradientNoise(parameters, cast("Communicators", among))
        for _ in range(STEPS):
            for parameter in parameters:
                parameter.grad = parameter.detach() - SD * torch.randn(BATCH, len(parameter), generator=random).mean(0)
            noise.add()
            with torch.no_grad():
                for parameter in parameters:
                    parameter.sub_(LR * cast("torch.Tensor", parameter.grad))
        found[rank] = noise.measured()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[rank] == found[0] for rank in range(trainers))
    return Found(**found[0])


@pytest.mark.parametrize(("trainers", "distance"), [(1, 8.0), (2, 8.0), (4, 8.0), (4, 30.0)])
def test_the_noise_scale_is_that_of_the_data(trainers: int, distance: float) -> None:
    """A batch's gradient varies by ``SIZE SD^2 / BATCH`` in all."""
    variance = SIZE * SD**2 / BATCH
    found = measured(trainers, distance)
    assert found.scale == pytest.approx(variance / distance**2 / trainers, rel=0.1)


def test_a_training_that_diverges_has_no_noise_scale() -> None:
    """Its profile has none, and is written all the same."""
    parameter = nn.Parameter(torch.zeros(3))
    noise = GradientNoise([parameter], cast("Communicators", Among(1)))
    parameter.grad = torch.full((3,), float("nan"))
    noise.add()
    assert noise.measured() is None
