"""One rank of DistributedDataParallel over emulated compute: its averages, and what a step took."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.quantities import Nanoseconds
from fleetbench.stragglers import ONE
from real.emulated.model import EmulatedModel

LAYERS, STEPS, MS = 5, 4, 1_000_000
TABLE = LayerTable(
    key="by hand",
    layers=tuple(
        Layer(
            name=f"block{index}",
            gradients=(Gradient(name=f"block{index}.weight", numel=1000, ready=Nanoseconds((LAYERS - index) * 4 * MS)),),
            forward=Nanoseconds(2 * MS),
            backward=Nanoseconds(4 * MS),
        )
        for index in range(LAYERS)
    ),
)


def main() -> None:
    """Train; rank 1 takes twice as long."""
    rank, ranks, store, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    model = EmulatedModel(TABLE, rank)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)
    gradients, took_ns = [], []
    for _ in range(STEPS):
        begin = time.monotonic_ns()
        model.pace.begin(rank * ONE)
        wrapped().backward()
        took_ns.append(time.monotonic_ns() - begin)
        gradients.append(torch.cat([parameter.grad for parameter in model.parameters() if parameter.grad is not None]).numpy().copy())
        model.zero_grad()
    np.savez(output, gradients=np.array(gradients), took_ns=np.array(took_ns))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
