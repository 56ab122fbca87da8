"""FP16 forwards with a loss scale that starts at 128. ``mixed_precision.py OUTPUT STEPS``."""

from __future__ import annotations

import sys

import numpy as np
import torch
import toy
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

output, steps = sys.argv[1], int(sys.argv[2])

strategy = DistributedStrategy()
strategy = strategy.replace(amp=True)
strategy = strategy.replace(amp_configs={"init_loss_scaling": 128})

fleet.init(strategy)
model = fleet.distributed_model(toy.model(torch.float32))
optimizer = fleet.distributed_optimizer(toy.optimizer(model))
in_backward: list[torch.Tensor] = []
types: list[str] = []
weight = next(model.parameters())
weight.register_hook(lambda gradient: in_backward.append(gradient.clone()))
next(model.children()).register_forward_hook(lambda _module, _inputs, result: types.append(str(result.dtype)))
history, gradients = [], []
for step in range(steps):
    inputs, labels = toy.batch(step, fleet.worker_index(), fleet.worker_num(), torch.float32)
    cross_entropy(model(inputs), labels).backward()
    assert weight.grad is not None
    gradients.append(weight.grad.clone().numpy())
    optimizer.step()
    optimizer.zero_grad()
    history.append(toy.flat(model).numpy().copy())
scaled = torch.stack(in_backward).numpy()
np.savez(f"{output}.{fleet.worker_index()}.npz", history=history, scaled=scaled, gradients=gradients, types=types)
