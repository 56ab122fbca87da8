"""One rank of the tests of static graphs: ``static_rank.py RANK RANKS STORE OUTPUT`` trains every case, and its truth.

Saved, by case: by how much parameters differ from DDP's, or how it was refused; and how many parameters have a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from living_fleet import be_rank, leave
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fleetbench.errors import FleetbenchError
from fleetbench.strategy import DistributedStrategy
from real.fleet import Fleet

SIZE = 6
STEPS = 6
SMALL = {"fuse_grad_size_in_MB": 0.0002, "static_graph": True}
LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 3}}
MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Again(nn.Module):
    """The second layer is reached twice through reentrant checkpoints, the third never; ``sparse``: so is an embedding."""

    def __init__(self, *, reentrant: bool, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.is_used = reentrant, False
        self.table = nn.Embedding(5, SIZE, sparse=True, dtype=torch.float64) if sparse else None
        self.first, self.twice, self.never, self.last = (nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of a batch."""
        rows = 0 if self.table is None else self.table((x[:, 0].abs() * 9).long() % 5)
        x = self.first(x) + rows
        for _ in range(2):
            x = checkpoint(self.twice, x.tanh(), use_reentrant=self.reentrant)
        if self.is_used:
            x = self.never(x)
        found: torch.Tensor = self.last(x)
        return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loop under a strategy beside ``static_graph``."""

    strategy: dict[str, Any] = field(default_factory=dict)
    kept: int = 0
    """Number of backwards in ``no_sync`` before each step's last."""
    inner: bool = False
    """Every step begins with a ``torch.autograd.grad``, which reentrant checkpoints do not allow."""
    again: bool = False
    """The model is made distributed again in the middle."""
    changes: bool = False
    """Another layer is used from the fourth step on."""
    joins: bool = False
    """The loop runs in ``model.join()``."""
    sparse: bool = False
    """A parameter has sparse gradients, for which torch has no weight decay."""


CASES = {
    "plain": Case(),
    "two communicators": Case(strategy={"nccl_comm_num": 2, "sync_nccl_allreduce": False}),
    "in order": Case(strategy={"build_strategy": {"enable_sequential_execution": True}}),
    "sparse": Case(sparse=True),
    "FP16": Case(strategy={"fp16_allreduce": True}),
    "no_sync": Case(kept=1),
    "torch.autograd.grad": Case(inner=True),
    "again": Case(again=True),
    "merge": Case(strategy=MERGE),
    "merge, fused": Case(strategy={**MERGE, "build_strategy": {"fuse_all_optimizer_ops": True}}),
    "Local SGD": Case(strategy=LOCAL),
    "fused": Case(strategy={"build_strategy": {"fuse_all_optimizer_ops": True}}),
    "changes": Case(changes=True),
    "joins": Case(joins=True),
}


def _train(case: Case, rank: int, wrap: Callable[[Again], Any], give: Callable[[Any], Any], *, reentrant: bool, merges: int = 1) -> Again:
    """Train by the case; ``merges``: accumulate so many steps by hand."""
    network = Again(reentrant=reentrant, sparse=case.sparse)
    model, optimizer = wrap(network), give(SGD(network.parameters(), weight_decay=0.0 if case.sparse else 0.1))
    if case.joins:
        model.join().__enter__()
    for step in range(1, STEPS + 1):
        if case.again and step == 4:
            model = wrap(network)
        network.is_used = case.changes and step > 3

        def loss(part: int, step: int = step, model: Any = model) -> torch.Tensor:
            x = torch.randn(4, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
            found: torch.Tensor = model(x).square().mean() / merges
            return found

        if case.inner:
            torch.autograd.grad(loss(5), network.first.weight)
        for part in range(case.kept):
            with model.no_sync():
                loss(part).backward()
        with nullcontext() if step % merges == 0 else model.no_sync():
            loss(9).backward()
        if step % merges == 0:
            optimizer.step()
        if step % merges == 0 or merges == 1:
            optimizer.zero_grad()
    return network


def _ddp(case: Case, network: nn.Module) -> nn.Module:
    found = DistributedDataParallel(network, static_graph=True)
    if case.strategy.get("fp16_allreduce"):
        found.register_comm_hook(None, fp16_compress_hook)
    return found


def _found(case: Case, rank: int) -> dict[str, Any]:
    fleet = Fleet()
    fleet.init(DistributedStrategy.from_dict({**SMALL, **case.strategy}), timeout_s=20.0)
    try:
        network = _train(case, rank, fleet.distributed_model, fleet.distributed_optimizer, reentrant=not case.inner)
        fleet.synchronize()
    except FleetbenchError as error:
        return {"refused": str(error)}
    except RuntimeError as error:  # torch's own
        return {"raised": str(error)}
    finally:
        leave(fleet)
    if "localsgd" in case.strategy:
        fleet = Fleet()
        fleet.init(DistributedStrategy.from_dict(case.strategy), timeout_s=20.0)
        truth = _train(case, rank, fleet.distributed_model, fleet.distributed_optimizer, reentrant=True)
        fleet.synchronize()
        leave(fleet)
    elif case.kept or case.inner or "gradient_merge" in case.strategy:
        wrap = partial(DistributedDataParallel, find_unused_parameters=True)
        truth = _train(case, rank, wrap, lambda own: own, reentrant=False, merges=2 if "gradient_merge" in case.strategy else 1)
    else:
        truth = _train(case, rank, partial(_ddp, case), lambda own: own, reentrant=True)
    pairs = zip(network.parameters(), truth.parameters(), strict=True)
    moved = float((network.twice.weight - Again(reentrant=True, sparse=False).twice.weight).abs().max())
    return {"off": max(float((one - other).abs().max()) for one, other in pairs), "moved": moved}


def main() -> None:
    """Save what each case found."""
    rank, ranks, store, output = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timedelta(seconds=60))
    be_rank(int(rank), int(ranks))
    found = {f"{name}/{key}": np.array(value) for name, case in CASES.items() for key, value in _found(case, int(rank)).items()}
    np.savez(output, **found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
