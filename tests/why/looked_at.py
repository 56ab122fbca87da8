"""A script of plain DDP for tests: ``looked_at.py FOLDER KIND``; each rank writes its losses below FOLDER, a line for each step."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleetbench import fleet

folder, kind = Path(sys.argv[1]), sys.argv[2]
MOST = int(sys.argv[3]) if len(sys.argv) > 3 else 100_000
rank = int(os.environ["RANK"])
store = os.environ.get("FLEETBENCH_STORE")
if store is None:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    """A small network, with buffers of 8 MB if they are what is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        if kind == "buffers":
            self.register_buffer("table", torch.zeros(2_000_000))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Ten numbers for each image."""
        if kind in ("slow", "fleet") and rank == 1:
            time.sleep(0.05)
        if kind == "evaluates" and not torch.is_grad_enabled():
            time.sleep(0.1)
        return self.layers(images)


def batch(step: int) -> torch.Tensor:
    """Images of a step."""
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


if kind == "fleet":
    fleet.init()
if kind in ("none", "fleet"):
    model: nn.Module = Net()
elif kind == "compiled":
    model = torch.compile(DistributedDataParallel(Net()), backend="eager")
elif kind == "unused":
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
else:
    model = DistributedDataParallel(Net())
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if kind == "evaluates":
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if kind == "fleet":
    model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
scaler = torch.amp.GradScaler("cpu", enabled=False)  # as scripts have it whose precision is an option


def train(losses: TextIO) -> None:
    """Train until the process is ended, or for so many steps."""
    for step in range(MOST):
        if kind == "hangs" and step == 12 and rank == 1:
            time.sleep(1000)
        loss = model(batch(step)).square().mean()
        loss.backward()
        if kind == "updates":  # by hand
            continue
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.write(f"{loss.item().hex()}\n")
        if kind == "evaluates" and step % 5 == 0:
            with torch.no_grad():
                model.module(batch(step))
        if kind == "dies" and step == 12 and rank == 1:
            raise ValueError("no more")


try:
    with (folder / f"losses{rank}").open("a", encoding="ascii") as own:
        train(own)
finally:
    states = [each for state in optimizer.state.values() for each in state.values()]
    sums = [each.double().sum().item().hex() for each in (*model.parameters(), *states)]
    (folder / f"state{rank}").write_text("\n".join(sums), encoding="ascii")
dist.destroy_process_group()
