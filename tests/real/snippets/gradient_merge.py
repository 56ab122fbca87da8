"""Four batches share an update. ``gradient_merge.py OUTPUT STEPS``."""

from __future__ import annotations

import sys

import numpy as np
import toy
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

output, steps = sys.argv[1], int(sys.argv[2])
asked = toy.count_collectives()

strategy = DistributedStrategy()
strategy = strategy.replace(gradient_merge=True)
strategy = strategy.replace(gradient_merge_configs={"k_steps": 4, "avg": True})

fleet.init(strategy)
model = fleet.distributed_model(toy.model())
optimizer = fleet.distributed_optimizer(toy.optimizer(model))
counts, history = [], []
for step in range(steps):
    inputs, labels = toy.batch(step, fleet.worker_index(), fleet.worker_num())
    before = len(asked)
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    counts.append(sum(name == "all_reduce" for name, _, _ in asked[before:]))
    history.append(toy.flat(model).numpy().copy())
np.savez(f"{output}.{fleet.worker_index()}.npz", history=history, counts=counts)
