"""All-reduce inside nodes of eight trainers, then between their leaders. ``hierarchical.py OUTPUT STEPS``."""

from __future__ import annotations

import sys

import numpy as np
import toy
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

output, steps = sys.argv[1], int(sys.argv[2])
asked = toy.count_collectives()

dist_strategy = DistributedStrategy.from_dict(
    {"mode": "nccl2", "use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 8},
)

fleet.init(dist_strategy)
model = fleet.distributed_model(toy.model())
optimizer = fleet.distributed_optimizer(toy.optimizer(model))
last: list[tuple[str, int, int]] = []
for step in range(steps):
    inputs, labels = toy.batch(step, fleet.worker_index(), fleet.worker_num())
    cross_entropy(model(inputs), labels).backward()
    last = asked.copy() if step == steps - 2 else last
    optimizer.step()
    optimizer.zero_grad()
found = asked[len(last) :]
names, elements, meeting = ([item[place] for item in found] for place in range(3))
np.savez(f"{output}.{fleet.worker_index()}.npz", parameters=toy.flat(model).numpy(), names=names, elements=elements, meeting=meeting)
