"""One process, or each of two by itself, trains the example's model: ``alone.py VARIANT STEPS``; rank 0 prints nanoseconds a step.

``plain`` has never heard of fleetbench; ``joined`` has joined a process group of torch; ``init`` imports fleetbench and calls
``fleet.init``, which joins one, too; ``four`` has all four lines.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch.nn.functional import cross_entropy

variant, steps = sys.argv[1], int(sys.argv[2])
torch.set_flush_denormal(True)  # as train.py
torch.set_num_threads(1)  # what fleet's default strategy sets
inputs, labels = torch.rand(50, 32, 64), torch.randint(0, 10, (50, 32))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if variant == "joined":
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
elif variant != "plain":
    from fleetbench import fleet

    fleet.init()
    if variant == "four":
        model = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(optimizer)
stamps = []
for step in range(steps):
    loss = cross_entropy(model(inputs[step % 50]), labels[step % 50])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    stamps.append(time.perf_counter_ns())
if os.environ.get("RANK", "0") == "0":
    print(json.dumps(stamps))
