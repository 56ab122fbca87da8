"""A task that every rank, and one process, can make for itself: a small model and its batches, in float64."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 6
CLASSES = 3
BATCH = 4
LR = 0.1


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same initial parameters in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


def optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, which Local SGD's documents ask for."""
    return torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9)


def joint_batch(step: int, ranks: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' samples of a step, one rank after the other; labels say nothing, so that the loss stays high."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(ranks * BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(0, CLASSES, (ranks * BATCH,), generator=generator)


def batch(step: int, rank: int, ranks: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's samples of a step."""
    inputs, labels = joint_batch(step, ranks, dtype)
    return inputs[rank * BATCH : (rank + 1) * BATCH], labels[rank * BATCH : (rank + 1) * BATCH]


def flat(network: nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in network.parameters()])


def count_collectives() -> list[tuple[str, int, int]]:
    """From now on, what torch is asked for: the collective, its elements, and the ranks that meet."""
    asked: list[tuple[str, int, int]] = []

    def counting(name: str) -> None:
        original = getattr(dist, name)

        def counted(tensor: torch.Tensor, *arguments: object, **named: object) -> object:
            asked.append((name, tensor.numel(), dist.get_world_size(named.get("group"))))  # type: ignore[arg-type]  # a group, or none
            return original(tensor, *arguments, **named)

        setattr(dist, name, counted)

    for name in ("all_reduce", "reduce", "broadcast", "all_gather_single"):
        counting(name)
    return asked
