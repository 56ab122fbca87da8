"""A script that trains until it is ended. ``endless_script.py FOLDER [TIMEOUT]``.

``FOLDER/pid.R`` is there once rank R has trained a while, with its number and its parent's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from fleetbench import fleet

folder = Path(sys.argv[1])
fleet.init(timeout_s=float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
step = 0
while True:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 5:
        partial = folder / f"partial.{fleet.worker_index()}"
        partial.write_text(f"{os.getpid()} {os.getppid()}")
        partial.rename(folder / f"pid.{fleet.worker_index()}")
