"""One rank of the tests of outer optimizers and fragments.

``outer_rank.py RANK RANKS STORE OUTPUT BACKEND``: trains every case, and torchft's two weights, and saves parameters of every step. The
backend is ``gloo``, or ``deferred``, which has NCCL's semantics. Four ranks train the cases of workers.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import training_problem as problem
from deferred import FakeStreams, StreamOrder, allowed, register
from outer_cases import CASES, STEPS, WORKERS
from torch import nn
from torch.nn.functional import cross_entropy
from torchft_fragments import GRADIENT, INNER_LR, configs, golden
from torchft_fragments import STEPS as RECORDED

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.communication.lanes import StreamLane
from real.engine.engine import Engine


class Weights(nn.Module):
    """Two layers of one weight each, whose gradients are constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return GRADIENT * sum(layer(x) for layer in self.layers)  # type: ignore[no-any-return]  # a module's call is untyped


def main() -> None:
    """Everything, saved under ``CASE/...``."""
    rank, ranks, store, output, backend = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    ground: AbstractContextManager[Any] = nullcontext()
    communicators = Communicators("gloo", timeout)
    if backend == "deferred":
        streams = FakeStreams()
        register(streams)
        communicators = Communicators("deferred", timeout, lane=lambda _name: StreamLane(streams))
        ground = StreamOrder(streams)
    found: dict[str, Any] = {}
    with ground:
        for name in CASES if ranks != "4" else WORKERS:
            found |= {f"{name}/{key}": value for key, value in train(name, communicators).items()}
        for overlap, mixing in golden() if ranks != "4" else ():
            found[f"torchft {overlap} {mixing}"] = record(overlap, mixing, communicators)
    np.savez(output, **found)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def train(name: str, communicators: Communicators) -> dict[str, Any]:
    """The parameters after every step, and those at the end of training."""
    changes, also = (CASES | WORKERS)[name]
    network = problem.model("float64")
    if communicators.rank > 0:  # the engine must start all ranks from rank 0's parameters
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(1.0)
    engine = Engine(network, DistributedStrategy.from_dict({"localsgd": True, "localsgd_configs": changes, **also}), communicators)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    engine.attach_optimizer(optimizer)
    history = []
    for step in range(1, STEPS + 1):
        inputs, labels = problem.own_batch(step, communicators.rank, communicators.trainers, "float64")
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        with allowed():
            history.append(problem.flat(network).numpy().copy())
    engine.flush(end=True)
    with allowed():
        end = problem.flat(network).numpy().copy()
        engine.close()
    return {"history": np.array(history), "end": end}


def record(overlap: int, mixing: float, communicators: Communicators) -> Any:
    """The two weights of torchft after every step: a trainer's own, then what all agree on; shape ``(steps + 1, 4)``."""
    network = Weights()
    strategy = DistributedStrategy(fuse_all_reduce_ops=False).replace(localsgd=True, localsgd_configs=configs(overlap, mixing))
    engine = Engine(network, strategy, communicators)
    optimizer = torch.optim.SGD(network.parameters(), lr=INNER_LR)
    engine.attach_optimizer(optimizer)
    rows = []
    for step in range(RECORDED + 1):
        if step:
            network(torch.ones(1, 1, dtype=torch.float64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with allowed():
            agreed = engine.executor.storage.snapshot()
            rows.append([float(value) for value in (*network.parameters(), *(agreed[name] for name, _ in network.named_parameters()))])
    engine.close()
    return np.array(rows)


if __name__ == "__main__":
    main()
