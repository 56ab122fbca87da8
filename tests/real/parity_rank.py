"""One rank of the parity tests: trains with the engine, or with DDP, and saves its parameters of every step.

``parity_rank.py RANK RANKS STORE OUTPUT DTYPES MOMENTUM CASE...``: types are separated by commas; a case
is a strategy as JSON, or ``ddp``.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import training_problem as problem
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fleetbench.strategy import DistributedStrategy
from real.communicators import Communicators
from real.engine import Engine


def main() -> None:
    """Run every case in every type, and save what each left behind under ``TYPE/CASE NUMBER/...``."""
    rank, ranks, store, output, dtypes, momentum, *cases = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timeout)
    saved: dict[str, Any] = {}
    for dtype in dtypes.split(","):
        for number, case in enumerate(cases):
            found = train(case, dtype, float(momentum), communicators)
            saved |= {f"{dtype}/{number}/{name}": value for name, value in found.items()}
    np.savez(output, **saved)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def train(case: str, dtype: str, momentum: float, communicators: Communicators) -> dict[str, Any]:
    """The parameters behind every step, those behind the end of training, the first gradient, and the bucket count."""
    rank, ranks = communicators.rank, communicators.trainers
    network = problem.model(dtype)
    optimizer = problem.sgd(network, momentum)
    engine = None
    trained: torch.nn.Module = network
    if case == "ddp":
        trained = DistributedDataParallel(network)
    else:
        if rank > 0:  # the engine must start all ranks from rank 0's parameters
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.add_(float(rank))
        engine = Engine(network, DistributedStrategy.from_dict(json.loads(case)), communicators)
        engine.attach_optimizer(optimizer)
    found: dict[str, Any] = {}
    history = []
    for step in range(1, problem.STEPS + 1):
        inputs, labels = problem.own_batch(step, rank, ranks, dtype)
        cross_entropy(trained(inputs), labels).backward()
        if step == 1:
            found["gradient"] = torch.cat([p.grad.reshape(-1) for p in network.parameters() if p.grad is not None]).numpy()
        optimizer.step()
        optimizer.zero_grad()
        history.append(problem.flat(network).numpy().copy())
    if engine is not None:
        engine.flush(end=True)
        found["buckets"] = np.array(len(engine.plan.buckets))
        engine.close()
    return {**found, "history": np.array(history), "end": problem.flat(network).numpy().copy()}


if __name__ == "__main__":
    main()
