"""A user's script that saves now and then, and goes on from its last save. ``saving_script.py OUTPUT CHECKPOINT [KILL]``.

With KILL rank 0 kills itself in the middle of the save after that step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import training_problem as problem
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

EVERY = 3
"""Steps between saves; rounds of four are open after 3, 6 and 9."""

fleet.init(DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 4}), timeout_s=30)  # type: ignore[arg-type]  # tables are decoded
model = fleet.distributed_model(problem.model("float64"))
optimizer = fleet.distributed_optimizer(problem.optimizer_of("momentum")(model))
path, kill = Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
done = fleet.load_persistables(path).step if path.exists() else 0
for step in range(done + 1, problem.STEPS + 1):
    problem.decay(optimizer, step)
    inputs, labels = problem.own_batch(step, fleet.worker_index(), fleet.worker_num(), "float64")
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % EVERY == 0:
        if step == kill and fleet.is_first_worker():
            os.fsync = lambda _handle: os.kill(os.getpid(), signal.SIGKILL)  # a part is written, and not yet on the disk
        fleet.save_persistables(path)
fleet.synchronize()
np.savez(f"{sys.argv[1]}.{fleet.worker_index()}.npz", parameters=problem.flat(model).numpy(), done=done)
