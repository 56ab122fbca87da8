"""One rank of ``measure.py``: what gradients take, in one arm. ``rank.py ARM OUTPUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleetbench import DistributedStrategy, fleet

LAYERS, WIDTH, STEPS = 48, 1024, 6
ARM, OUTPUT = sys.argv[1], Path(sys.argv[2])


def resident(name: str) -> int:
    """Bytes of this process: ``VmRSS``, now, or ``VmHWM``, at most since ``forget``."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget() -> None:
    """Begin a new maximum."""
    Path("/proc/self/clear_refs").write_text("5")


def step() -> None:
    """One step."""
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


fleet.init(DistributedStrategy(fuse_grad_size_in_MB=0) if ARM == "fleetbench, one bucket" else None)
torch.manual_seed(1)
model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
inputs = torch.randn(4, WIDTH)
for _ in range(2):
    step()
before = resident("VmRSS")
if ARM.startswith("fleetbench"):
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
elif ARM != "alone":
    model = DistributedDataParallel(model, gradient_as_bucket_view=ARM == "DDP, bucket views")
for _ in range(STEPS):
    step()
at_rest = resident("VmRSS") - before
forget()
for _ in range(STEPS):
    step()
peak = resident("VmHWM") - before
if fleet.worker_index() == 0:
    of_all_gradients = LAYERS * WIDTH * WIDTH * 4
    OUTPUT.write_text(json.dumps({"arm": ARM, "at_rest": at_rest / of_all_gradients, "peak": peak / of_all_gradients}))
