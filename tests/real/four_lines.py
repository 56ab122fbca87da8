"""A user's script with fleet's four lines; it saves what it learnt. ``four_lines.py OUTPUT [STRATEGY.toml]``."""

from __future__ import annotations

import sys

import numpy as np
import training_problem as problem
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

strategy = DistributedStrategy.load(sys.argv[2]) if len(sys.argv) > 2 else None
fleet.init(strategy)
model = fleet.distributed_model(problem.model("float64"))
optimizer = fleet.distributed_optimizer(problem.optimizer_of("momentum")(model))
for step in range(1, problem.STEPS + 1):
    problem.decay(optimizer, step)
    inputs, labels = problem.own_batch(step, fleet.worker_index(), fleet.worker_num(), "float64")
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
fleet.synchronize()
np.savez(f"{sys.argv[1]}.{fleet.worker_index()}.npz", parameters=problem.flat(model).numpy(), ranks=fleet.worker_num())
print(f"rank {fleet.worker_index()} of {fleet.worker_num()} is done")
