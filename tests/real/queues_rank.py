"""One rank of a training whose buckets queue on one communicator: ``queues_rank.py RANK RANKS STORE OUTPUT``.

Every parameter's gradient is a tensor that this rank draws, so that the averages are known. Saves, a
strategy, the gradients after every step, and of every collective its step, bucket, begin and end.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.engine.engine import Engine

SIZES = (400_000, 7, 1_000_000, 300, 250_000, 1, 600_000, 90_000, 33, 500_000)
"""In the order of parameters; gradients come the other way round."""
STEPS = 3
STRATEGIES: dict[str, dict[str, Any]] = {
    "free": {"sync_nccl_allreduce": False},
    "in step": {},
    "in step on two": {"nccl_comm_num": 2},
    "free on two": {"nccl_comm_num": 2, "sync_nccl_allreduce": False},
    "cast": {"sync_nccl_allreduce": False, "bf16_allreduce": True},
    "local": {"sync_nccl_allreduce": False, "localsgd": True, "localsgd_configs": {"k_steps": 1, "momentum": "average"}},
}


def gradient(rank: int, step: int, position: int) -> torch.Tensor:
    """What this rank's loss gives a parameter."""
    generator = torch.Generator().manual_seed(1_000 * rank + 100 * step + position)
    return torch.randn(SIZES[position], generator=generator)


class Given(nn.Module):
    """Parameters that are zero at first, and an output whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in SIZES)

    def forward(self, rank: int, step: int) -> torch.Tensor:
        """A scalar."""
        total = torch.zeros(())
        for position, value in enumerate(self.values):
            total = total + (value * gradient(rank, step, position)).sum()
        return total


def train(fields: dict[str, Any], communicators: Communicators) -> dict[str, Any]:
    """The gradients, the parameters and the spans of a few steps."""
    model = Given()
    engine = Engine(model, DistributedStrategy(fuse_all_reduce_ops=False, **fields), communicators)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine.attach_optimizer(optimizer)
    saved: dict[str, Any] = {}
    for step in range(STEPS):
        model(dist.get_rank(), step).backward()
        if engine.plan.exchange:
            saved[f"gradients {step}"] = torch.cat([value.grad for value in model.values if value.grad is not None]).numpy()
        optimizer.step()
        optimizer.zero_grad()
    saved["parameters"] = torch.cat([value.detach() for value in model.values]).numpy()
    engine.stopwatch.finish()
    spans = [span for span in engine.stopwatch.spans if span.communicator is not None]
    saved["spans"] = np.array([(span.step, int(span.name.split()[1]), span.communicator, span.start_ns, span.end_ns) for span in spans])
    engine.close()
    return saved


def main() -> None:
    """Train every strategy in turn."""
    rank, ranks, store, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    communicators = Communicators("gloo", timedelta(seconds=60))
    saved: dict[str, Any] = {}
    for name, fields in STRATEGIES.items():
        saved |= {f"{name}/{key}": value for key, value in train(fields, communicators).items()}
    group = communicators._group("world", 0)
    saved["threads"] = np.array(group._get_backend(torch.device("cpu")).options._threads)
    in_turn = communicators._group("world", communicators.in_turn)
    saved["threads in turn"] = np.array(in_turn._get_backend(torch.device("cpu")).options._threads)
    np.savez(output, **saved)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
