"""A script with fleet's four lines that trains until it is ended: ``inside_script.py NOTES``; a line a launch and rank goes to NOTES.

It says the rank, and what its environment has for OMP_DYNAMIC.

Rank 1 of the first launch is killed in its twentieth step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from fleetbench import fleet

notes = Path(sys.argv[1])
is_first = not notes.exists()
fleet.init(timeout_s=30.0)
with notes.open("a") as file:
    file.write(f"{fleet.worker_index()} of {fleet.worker_num()}, {os.environ.get('OMP_DYNAMIC')}\n")
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
step = 0
while True:
    step += 1
    if is_first and step == 20 and fleet.worker_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
