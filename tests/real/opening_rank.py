"""One rank that counts on which communicators collectives run: ``opening_rank.py RANK RANKS STORE OUTPUT``.

On a process group with NCCL's semantics. Saves, a strategy, the number of collectives of every communicator
when the engine is ready, and after two steps; in the order of their making.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deferred import FakeStreams, register
from torch import nn

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.communication.lanes import StreamLane
from real.engine.engine import Engine

TIMEOUT = timedelta(seconds=60)
STRATEGIES: dict[str, dict[str, Any]] = {
    "leaders": {"use_hierarchical_allreduce": True, "hierarchical_inner_ranks": 2, "nccl_comm_num": 2},
    "batch norm": {"sync_batch_norm": True},
}


def count(strategy: dict[str, Any]) -> dict[str, Any]:
    """Collectives by communicator: at first, and later."""
    streams = FakeStreams()
    register(streams)
    communicators = Communicators("deferred", TIMEOUT, lane=lambda _name: StreamLane(streams))
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))))
    fields = DistributedStrategy.from_dict({**strategy, "fuse_all_reduce_ops": False})
    engine = Engine(model, fields, communicators)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)

    def counted() -> list[int]:
        names = [made._stream.name for made in streams.communicators]  # type: ignore[attr-defined]  # deferred groups
        return [sum(issued[0] == name for issued in streams.issued) for name in names]

    at_first = counted()
    for _ in range(2):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    later = counted()
    engine.close()
    communicators.close()
    return {"at first": np.array(at_first), "later": np.array(later)}


def main() -> None:
    """Count for every strategy."""
    rank, ranks, store, output = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=TIMEOUT)
    torch.set_num_threads(1)
    saved = {f"{name}/{when}": found for name, strategy in STRATEGIES.items() for when, found in count(strategy).items()}
    np.savez(output, **saved)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
