"""Local SGD whose K follows the loss and the learning rate, once an epoch. ``local_sgd_adaptive.py OUTPUT EPOCHS STEPS_PER_EPOCH``."""

from __future__ import annotations

import sys

import numpy as np
import toy
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

PLACE_RATE_LOSS = 3
"""Numbers that each trainer tells the others at an averaging."""

output, epochs, steps_per_epoch = sys.argv[1], *(int(text) for text in sys.argv[2:])
asked = toy.count_collectives()

strategy = DistributedStrategy()
strategy = strategy.replace(adaptive_localsgd=True)
strategy = strategy.replace(adaptive_localsgd_configs={"init_k_steps": 2, "begin_step": 1, "variant": "document"})

fleet.init(strategy)
model = fleet.distributed_model(toy.model())
optimizer = fleet.distributed_optimizer(toy.optimizer(model))
sizes, history, step = [], [], 0
for _ in range(epochs):
    for _ in range(steps_per_epoch):
        before = len(asked)
        inputs, labels = toy.batch(step, fleet.worker_index(), fleet.worker_num())
        loss = cross_entropy(model(inputs), labels)
        fleet.report(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(toy.flat(model).numpy().copy())
        averaged = sum(name == "all_reduce" and numel == history[-1].size for name, numel, _ in asked[before:])
        agreed = sum(name.startswith("all_gather") and numel == PLACE_RATE_LOSS * fleet.worker_num() for name, numel, _ in asked[before:])
        sizes.append([averaged, agreed])
        step += 1
    fleet.end_epoch()
    for group in optimizer.param_groups:
        group["lr"] *= 0.4
np.savez(f"{output}.{fleet.worker_index()}.npz", history=history, sizes=sizes)
