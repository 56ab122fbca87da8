"""A small training problem whose batches every rank, and a single process, can make for themselves."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = 50
BATCH = 8
LR = 0.05


def model(dtype: str) -> nn.Module:
    """Unequal layers, so that buckets are unequal, with initial parameters that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 7), nn.Tanh(), nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
        return layers.to(getattr(torch, dtype))


def joint_batch(step: int, ranks: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of all ranks at a step, ranks one after another."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(ranks * BATCH, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (ranks * BATCH,), generator=generator)
    return inputs.to(getattr(torch, dtype)), labels


def own_batch(step: int, rank: int, ranks: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's part of the joint batch."""
    inputs, labels = joint_batch(step, ranks, dtype)
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    return inputs[mine], labels[mine]


def sgd(network: nn.Module, momentum: float) -> torch.optim.SGD:
    """SGD with weight decay."""
    return torch.optim.SGD(network.parameters(), lr=LR, momentum=momentum, weight_decay=1e-3)


def flat(network: nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in network.parameters()])


def joint_training(ranks: int, dtype: str, momentum: float) -> torch.Tensor:
    """The parameters after one process has trained on the joint batches."""
    network = model(dtype)
    optimizer = sgd(network, momentum)
    for step in range(1, STEPS + 1):
        inputs, labels = joint_batch(step, ranks, dtype)
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(network)


def local_sgd_training(ranks: int, dtype: str, momentum: float, sync_steps: set[int]) -> dict[int, torch.Tensor]:
    """Local SGD written out in one process: the averaged parameters behind every step of ``sync_steps``."""
    networks = [model(dtype) for _ in range(ranks)]
    optimizers = [sgd(network, momentum) for network in networks]
    averages = {}
    for step in range(1, STEPS + 1):
        for rank, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            inputs, labels = own_batch(step, rank, ranks, dtype)
            cross_entropy(network(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step in sync_steps:
            mean = torch.stack([flat(network) for network in networks]).mean(dim=0)
            averages[step] = mean
            for network in networks:
                nn.utils.vector_to_parameters(mean.clone(), network.parameters())
    return averages
