"""A rank of a DDP that is changed between steps: ``living_rank.py RANK RANKS STORE OUTPUT``; what it found is saved as text."""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleetbench.config import encode
from fleetbench.why.buckets import buckets_of
from fleetbench.why.change import DdpChange
from real.why.readiness import ReadinessClock
from real.why.settings import LivingDdp

CAPS = (None, 0.002, 0.01, 0.05, 25.0)
CHANGES = (
    DdpChange(),
    DdpChange(bucket_cap_mb=0.004),
    DdpChange(find_unused_parameters=True),
    DdpChange(broadcast_buffers=False),
    DdpChange(bucket_cap_mb=0.01),
    DdpChange(),
)


class Net(nn.Module):
    """Layers of odd sizes, with statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        widths = (20, 31, 47, 5, 61, 13)
        pairs = itertools.pairwise(widths)
        self.layers = nn.Sequential(*[part for pair in pairs for part in (nn.Linear(*pair), nn.BatchNorm1d(pair[1]), nn.Tanh())])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Thirteen numbers for each image."""
        return self.layers(images)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One step of training; its loss."""
    rank = dist.get_rank()
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * number + rank))
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def buckets() -> list[dict[str, Any]]:
    """By cap, the bytes of DDP's buckets after its first step, and those that are predicted."""
    found = []
    for cap in CAPS:
        model = DistributedDataParallel(Net(), bucket_cap_mb=cap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clock = ReadinessClock(model)
        step(model, optimizer, 0)
        with clock.on():
            for number in range(5):
                step(model, optimizer, number)
                clock.step_ends()
        readiness = clock.found()
        assert readiness is not None
        found.append(
            {
                "cap": cap,
                "torch": LivingDdp(model).described(buffers_change=True).bucket_nbytes,
                "own": [nbytes for nbytes, _ in buckets_of(readiness, cap)],
            }
        )
    return found


def changes() -> dict[str, Any]:
    """Losses of a model that is changed every two steps, and of one that is not; and what the first is at the end."""
    losses = []
    for is_changed in (False, True):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        living, own = LivingDdp(model), []
        at_first = encode(LivingDdp(model).described(buffers_change=True)) | {"bucket_nbytes": None}
        for number in range(2 * len(CHANGES)):
            if is_changed and number % 2 == 0:
                living.change(CHANGES[number // 2])
                settings = CHANGES[number // 2]
                assert settings.find_unused_parameters in (None, model.find_unused_parameters)
                assert settings.broadcast_buffers in (None, model.broadcast_buffers)
            own.append(step(model, optimizer, number))
        losses.append(own)
        at_last = encode(LivingDdp(model).described(buffers_change=True)) | {"bucket_nbytes": None}
        assert at_last == at_first
    return {"plain": losses[0], "changed": losses[1]}


class Within(Net):
    """Backward and update come within the forward, as in Lightning's manual optimization."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss = super().forward(images).square().mean()
        loss.backward()
        time.sleep(0.05)  # as an update takes
        return loss.detach()


def within() -> dict[str, Any]:
    """What is seen of such a model."""
    model = DistributedDataParallel(Within())
    clock = ReadinessClock(model)
    with model.no_sync(), clock.on():
        for _ in range(3):
            model(torch.ones(8, 20))
            clock.step_ends()
    found = clock.found()
    assert found is not None
    return {"within_ns": [max(found.ready_ns)]}


def main() -> None:
    """Look at both."""
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    store = dist.FileStore(sys.argv[3], ranks)  # type: ignore[attr-defined]  # as torch's own tests
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    found = {"buckets": buckets(), **changes(), **within()}
    np.savez(sys.argv[4], found=json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
