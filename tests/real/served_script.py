"""A user's script with parameter servers: counts to a number that only a training without loss or repetition reaches.

Arguments: k_steps, steps, folder of checkpoints or "-", rank that kills itself at half time or -1, seconds of a pause, folder of files.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from fleetbench import DistributedStrategy, fleet

k_steps, steps, folder, suicide, pause = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
a_sync = {"a_sync": True, "a_sync_configs": {"k_steps": k_steps}} if k_steps >= 0 else {}
fleet.init(DistributedStrategy.from_dict({"mode": "ps", **a_sync}), timeout_s=float(os.environ.get("SERVED_TIMEOUT_S", "80")))
model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
if fleet.is_server():
    print(f"server {fleet.server_index()} of {fleet.server_num()}")
    restored = fleet.init_server(folder if folder != "-" else None)
    print(f"restored: {restored}")
    fleet.run_server()
else:
    fleet.init_worker()
    print(f"trainer {fleet.worker_index()} of {fleet.worker_num()}")
    for step in range(steps):
        if step == steps // 2 and folder != "-":
            fleet.save_persistables(folder)
        if step == steps // 2 and fleet.worker_index() == suicide:
            os.kill(os.getpid(), getattr(signal, os.environ.get("SERVED_SIGNAL", "SIGKILL")))
        loss = model(torch.ones(1, 3)).sum()  # whose gradient is 1 in every number
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(pause)
    if folder != "-":
        fleet.save_persistables(folder)
    fleet.stop_worker()
    Path(sys.argv[6]).joinpath(f"done.{fleet.worker_index()}").touch()
