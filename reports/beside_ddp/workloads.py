"""The four models that are timed, of fixed shape and batch, and the batches that every arm trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


class Residual(nn.Module):
    """A small layer with a path around it, so that 120 of them still train."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Input and output ``(batch, width)``."""
        return inputs + 0.1 * torch.tanh(self.linear(inputs))


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions (arXiv 1512.03385, figure 5, left)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels_out)
        self.second = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels_out)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.around = nn.Sequential(nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Input ``(batch, channels_in, height, width)``."""
        hidden = torch.relu(self.first_norm(self.first(inputs)))
        return torch.relu(self.second_norm(self.second(hidden)) + self.around(inputs))


def deep() -> nn.Module:
    """242 small tensors: 120 residual layers of 32 units and a head; 0.13 M parameters."""
    return nn.Sequential(*(Residual(32) for _ in range(120)), nn.Linear(32, 10))


def wide() -> nn.Module:
    """Six tensors, two of them large; 5.3 M parameters."""
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def conv() -> nn.Module:
    """Eight convolutions with batch norm; 0.58 M parameters."""
    layers: list[nn.Module] = []
    previous = 3
    for channels, stride in ((32, 1), (32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (128, 1), (128, 2)):
        layers += [nn.Conv2d(previous, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        previous = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, 10))


def resnet18() -> nn.Module:
    """ResNet-18 (arXiv 1512.03385, table 1) with a head of 10 classes; 11.2 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    previous = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(previous, channels, stride), BasicBlock(channels, channels, 1)]
        previous = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and the shape of its input, ``(batch, *features)``."""

    build: Callable[[], nn.Module]
    features: tuple[int, ...]
    batch: int

    def model(self) -> nn.Module:
        """The model with initial parameters that are always the same, in training mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return self.build()

    def batches(self, num: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A rank's own batches of the steps 1 to ``num``, the same in every arm."""
        found = []
        for step in range(num):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            inputs = torch.randn(self.batch, *self.features, generator=generator)
            found.append((inputs, torch.randint(0, 10, (self.batch,), generator=generator)))
        return found


WORKLOADS = {
    "deep": Workload(build=deep, features=(32,), batch=16),
    "wide": Workload(build=wide, features=(512,), batch=16),
    "conv": Workload(build=conv, features=(3, 16, 16), batch=8),
    "resnet18": Workload(build=resnet18, features=(3, 64, 64), batch=4),
}
