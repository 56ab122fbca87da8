"""One rank of the profiling tests: profile legs with and without synchronised batch norm.

``profile_rank.py RANK RANKS STORE OUTPUT``.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import numpy as np
import profile_steps
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.layer_times import ProfileLeg
from real.leg import Leg

STEP_S = 0.02


def main() -> None:
    """Save what the profile legs measured and left over."""
    rank, ranks, store, output = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timeout)
    saved: dict[str, object] = {}
    for name, strategy in (("plain", DistributedStrategy()), ("synchronised", DistributedStrategy(sync_batch_norm=True))):
        saved |= {f"{name}/{what}": value for what, value in _profiled(communicators, strategy).items()}
    np.savez(output, **saved)  # type: ignore[arg-type]  # lists of numbers are arrays
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def _profiled(communicators: Communicators, strategy: DistributedStrategy) -> dict[str, object]:
    rank = communicators.rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(rank)
    begun: list[int] = []

    def next_loss() -> torch.Tensor:
        time.sleep(STEP_S * (1 + rank))  # ranks of unequal speed take the same number of steps
        inputs, labels = torch.randn(16, 6, generator=generator) + rank, torch.randint(0, 3, (16,), generator=generator)
        return cross_entropy(model(inputs), labels)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    leg = Leg(strategy=strategy, steps=40, warmup_steps=5, profile=True, max_s=0.8)
    measured = profile_steps.run(ProfileLeg(model, optimizer, communicators), optimizer, next_loss, leg, begun.append)
    return {
        "begun": begun,
        "backward": measured.backward,
        "statistics": model[1].running_mean.numpy(),
        "weight": model[0].weight.detach().numpy(),
    }


if __name__ == "__main__":
    main()
