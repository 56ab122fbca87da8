"""A script with fleet's four lines; it saves all of a sharded model. ``sharded_lines.py OUTPUT STRATEGY.toml``."""

from __future__ import annotations

import sys

import numpy as np
import torch
import training_problem as problem
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

fleet.init(DistributedStrategy.load(sys.argv[2]))
model = fleet.distributed_model(problem.model("float64"))
optimizer = fleet.distributed_optimizer(problem.optimizer_of("momentum")(model))
for step in range(1, problem.STEPS + 1):
    problem.decay(optimizer, step)
    inputs, labels = problem.own_batch(step, fleet.worker_index(), fleet.worker_num(), "float64")
    loss = cross_entropy(model(inputs), labels)
    fleet.report(loss=loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
whole = torch.cat([own.full_tensor().detach().reshape(-1) for own in model.parameters()])
np.savez(f"{sys.argv[1]}.{fleet.worker_index()}.npz", parameters=whole.numpy())
