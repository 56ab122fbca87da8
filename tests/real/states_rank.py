"""One rank of the test of optimizers' states: ``states_rank.py RANK RANKS STORE OUTPUT``; saves the parameters after every step."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import training_problem as problem
from states_cases import RULES, STEPS, K, cases, network_of, optimizer_of
from torch.nn.functional import cross_entropy

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.engine.engine import Engine


def train(name: str, rule: str, communicators: Communicators) -> Any:
    """Parameters ``(steps, parameters)``."""
    network = network_of()
    optimizer = optimizer_of(name, network)
    strategy = DistributedStrategy.from_dict({"localsgd": True, "localsgd_configs": {"k_steps": K, **RULES[rule]}})
    engine = Engine(network, strategy, communicators)
    engine.attach_optimizer(optimizer)
    history = []
    for step in range(1, STEPS + 1):
        inputs, labels = problem.own_batch(step, communicators.rank, communicators.trainers, "float64")
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(problem.flat(network).numpy().copy())
    engine.flush(end=True)
    engine.close()
    return np.array(history)


def main() -> None:
    """Every case."""
    rank, ranks, store, output = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timeout)
    np.savez(output, **{f"{name}, {rule}": train(name, rule, communicators) for name, rule in cases()})
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
