"""One rank of the wire's counts: ``wire_counts_rank.py RANK RANKS STORE OUTPUT``.

Trains a ResNet-50 with 102 classes for three steps under each of the published settings, and saves
the sizes and types of the all-reduces that torch was asked for in the last.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from wire_counts_cases import CASES

from fleetbench.strategy import DistributedStrategy
from fleetbench.workloads.models.registry import build_model
from real.communication.communicators import Communicators
from real.engine.engine import Engine

CLASSES = 102
STEPS = 3


class Touched(nn.Module):
    """A model's parameters in a chain that uses each once, from the first to the last: as ready as its layers' would be, at no cost."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` plus the first element of every parameter."""
        for parameter in self.model.parameters():
            x = x + parameter.reshape(-1)[0].float()
        return x


def main() -> None:
    """Run every case."""
    rank, ranks, store, output = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timeout)
    saved: dict[str, Any] = {}
    for case in CASES:
        model = build_model("resnet50", {"classes": CLASSES}, "float32", 0)
        if case.half:
            for module in model.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    module.half()
        trained = model if case.images else Touched(model)
        saved |= {f"{case.name}/{name}": value for name, value in count(trained, case.megabytes, communicators, images=case.images).items()}
    np.savez(output, **saved)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def count(model: nn.Module, megabytes: float, communicators: Communicators, *, images: bool) -> dict[str, Any]:
    """The all-reduces of the last step."""
    engine = Engine(model, DistributedStrategy(fuse_grad_size_in_MB=megabytes), communicators)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    engine.attach_optimizer(optimizer)
    asked: list[tuple[int, str]] = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        asked.append((tensor.numel(), str(tensor.dtype).removeprefix("torch.")))
        return original(tensor, *arguments, **named)

    dist.all_reduce = counting
    try:
        for _ in range(STEPS if not images else 2):
            asked.clear()
            if images:
                cross_entropy(model(torch.randn(2, 3, 33, 33)), torch.zeros(2, dtype=torch.int64)).backward()
            else:
                model(torch.zeros(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.all_reduce = original
    found = {"sizes": np.array([size for size, _ in asked]), "dtypes": np.array([dtype for _, dtype in asked])}
    found["parameters"] = np.array([parameter.numel() for parameter in model.parameters()])
    found["first"] = np.array(engine.plan.buckets[0].gradients[0])
    engine.close()
    return found


if __name__ == "__main__":
    main()
