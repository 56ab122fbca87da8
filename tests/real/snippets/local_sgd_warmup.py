"""Local SGD whose K grows epoch by epoch after a warm-up. ``local_sgd_warmup.py OUTPUT K EPOCHS STEPS_PER_EPOCH``."""

from __future__ import annotations

import sys

import numpy as np
import toy
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

output, local_sgd_steps, epochs, steps_per_epoch = sys.argv[1], *(int(text) for text in sys.argv[2:])
asked = toy.count_collectives()

dist_strategy = DistributedStrategy()
dist_strategy = dist_strategy.replace(use_local_sgd=True)
dist_strategy = dist_strategy.replace(local_sgd_steps=local_sgd_steps, local_sgd_is_warm_steps=3)

fleet.init(dist_strategy)
model = fleet.distributed_model(toy.model())
optimizer = fleet.distributed_optimizer(toy.optimizer(model))
averagings, history, step = [], [], 0
for _ in range(epochs):
    before = len([name for name, _, _ in asked if name == "all_reduce"])
    for _ in range(steps_per_epoch):
        inputs, labels = toy.batch(step, fleet.worker_index(), fleet.worker_num())
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(toy.flat(model).numpy().copy())
        step += 1
    averagings.append(len([name for name, _, _ in asked if name == "all_reduce"]) - before)
    fleet.end_epoch()
np.savez(f"{output}.{fleet.worker_index()}.npz", history=history, averagings=averagings)
