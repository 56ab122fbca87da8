"""The script that is measured: the model and loop of ``examples/train_digits.py``, with five lines of fleet.

``train.py STEPS [STRATEGY.toml]``. With ``STAMPS`` in the environment, rank 0 leaves there when every step ended, however it
is ended itself; with ``HISTORY``, every rank leaves its parameters behind every step, trained in double precision.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

# The loss goes to zero within one launch of many legs, and gradients below float32's normal numbers make this model's step twice as long.
torch.set_flush_denormal(True)
BATCH = 32
inputs, labels = load_digits(return_X_y=True)


def network(dtype: torch.dtype = torch.float32, width: int = 256) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return nn.Sequential(*layers).to(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The example's."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int, rank: int, trainers: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's samples of a step, counted from 0."""
    first = (step * trainers + rank) * BATCH % (len(inputs) - BATCH)
    rows = slice(first, first + BATCH)
    return torch.tensor(inputs[rows] / 16, dtype=dtype), torch.tensor(labels[rows])


def main() -> None:
    """Train."""
    stamps_file, history_file = os.environ.get("STAMPS"), os.environ.get("HISTORY")
    dtype = torch.float64 if history_file else torch.float32
    model = network(dtype, 32 if history_file else 256)
    optimizer = optimizer_of(model)
    fleet.init(DistributedStrategy.load(sys.argv[2]) if len(sys.argv) > 2 else DistributedStrategy())
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    rank, trainers = fleet.worker_index(), fleet.worker_num()
    stamps, history = [], []
    try:
        for step in range(int(sys.argv[1])):
            data, target = batch(step, rank, trainers, dtype)
            loss = cross_entropy(model(data), target)
            loss.backward()
            fleet.report(loss=loss)
            try:
                optimizer.step()
            finally:
                stamps.append(time.perf_counter_ns())
                if history_file:
                    history.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy())
            optimizer.zero_grad()
        fleet.synchronize()
    finally:
        if stamps_file and rank == 0:
            np.save(stamps_file, np.array(stamps))
        if history_file:
            np.save(Path(f"{history_file}{rank}.npy"), np.stack(history))


if __name__ == "__main__":
    main()
