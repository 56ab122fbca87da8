"""One rank of the link test's tests: ``links_rank.py RANK RANKS STORE OUTPUT`` saves what it finds."""

from __future__ import annotations

import json
import os
import sys
import threading

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fleetbench.config import encode
from real.why.links import measure_links

SIZES = (4096, 65536, 262144)


def train(*, measures: bool) -> float:
    """The loss of the sixth step of a DDP training, with or without a link test between two steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if measures and step == 3:
            measure_links(sizes=SIZES[:2], seconds=0.05)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss)


def main() -> None:
    """Measure in the job's group and in a part of it, and look at what is left over."""
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    store = dist.FileStore(sys.argv[3], ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    part = dist.new_group([0, 1])
    measure_links(sizes=SIZES, seconds=0.1)
    dist.barrier()  # rank 0 has deleted its keys
    group, keys, environment = dist.group.WORLD, store.num_keys(), dict(os.environ)
    groups, threads = len(dist.distributed_c10d._world.pg_map), threading.active_count()
    process = psutil.Process()
    before, files = process.num_threads(), process.num_fds()
    links = measure_links(sizes=SIZES, seconds=0.1)
    of_part = measure_links(part, sizes=SIZES[:1], seconds=0.1) if rank < 2 else links
    dist.barrier()
    left = {
        "group": dist.group.WORLD is group,
        "groups": len(dist.distributed_c10d._world.pg_map) == groups,
        "keys": store.num_keys() == keys,
        "environment": dict(os.environ) == environment,
        "threads": (threading.active_count(), process.num_threads()) == (threads, before),
        "files": process.num_fds() == files,
    }
    mean = torch.ones(1)
    dist.all_reduce(mean)
    losses = [train(measures=measures) for measures in (False, True)]
    found = {"links": encode(links), "part": encode(of_part)}
    found |= {"left": left, "after": float(mean), "losses": losses}
    np.savez(sys.argv[4], found=json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
