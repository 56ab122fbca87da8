"""One rank of the tests of buffers: trains a model that has buffers of every kind, each rank with its own.

``buffers_rank.py RANK RANKS STORE OUTPUT KIND``: ``average`` or ``local``, or one of ``CHANGES``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import CollectiveFailed, Communicators
from real.engine.engine import Engine

CHANGES = ("longer", "removed", "before the optimizer")


def main() -> None:
    """Train, and save the buffers as complex numbers; of a change, the error."""
    rank, kind = int(sys.argv[1]), sys.argv[5]
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=int(sys.argv[2]))
    torch.set_num_threads(1)
    communicators = Communicators("gloo", timedelta(seconds=30))
    handed = count()
    found = {"error": np.array("")}
    try:
        model, told = train(rank, kind, communicators)
        found |= {name: buffer.to(torch.complex128).numpy() for name, buffer in model.named_buffers()}
        found |= {"bytes told": np.array(told), "bytes handed over": np.array(sum(handed))}
    except (CollectiveFailed, ConfigError) as error:  # what one rank refuses, others lose
        found["error"] = np.array(str(error))
    np.savez(sys.argv[4], **found)
    if kind in ("average", "local"):
        communicators.barrier()
        dist.destroy_process_group()


def count() -> list[int]:
    """The bytes of each all-reduce from now on."""
    handed: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        handed.append(tensor.nbytes)
        return all_reduce(tensor, *rest, **named)

    dist.all_reduce = counted
    return handed


def train(rank: int, kind: str, communicators: Communicators) -> tuple[nn.Module, int]:
    """Three steps, after each of which trainers average; then no forward changes a buffer. And the bytes that the engine says it sent."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    averaging = {"k_steps": 1, "momentum": "average", "buffers": "local" if kind == "local" else "average"}
    engine = Engine(
        model_with_buffers(model),
        DistributedStrategy(localsgd=True, localsgd_configs=averaging),
        communicators,
    )  # type: ignore[arg-type]  # tables are decoded
    if kind == "before the optimizer" and rank:
        model.register_buffer("numbers", torch.zeros(7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine.attach_optimizer(optimizer)
    for step in range(3):
        for index, (name, buffer) in enumerate(list(model.named_buffers())):
            values = (1 + index + step + 10 * rank) * torch.ones_like(buffer) * (1j if buffer.is_complex() else 1)
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, values.to(buffer.dtype))  # another tensor, as a module may put in its place
        if step == 1 and rank:
            model.register_buffer("later", torch.ones(2 + rank))
            if kind == "longer":
                model.numbers = torch.zeros(7)
            elif kind == "removed":
                del model.numbers
        model(torch.ones(3 + rank, 4)).sum().backward()
        optimizer.step()
    engine.stopwatch.finish()
    return model, sum(step.record.bytes_sent for step in engine.stopwatch.steps)


def model_with_buffers(model: nn.Module) -> nn.Module:
    """A model with buffers of every kind beside those of its batch norm."""
    for name, buffer in {
        "numbers": torch.zeros(2, 3),
        "halves": torch.zeros(2, dtype=torch.bfloat16),
        "rotations": torch.zeros(4, dtype=torch.complex64),
        "mask": torch.zeros(4, dtype=torch.bool),
        "bits": torch.zeros(4, dtype=torch.uint8),
        "words": torch.zeros(4, dtype=torch.int64),
        "flag": torch.zeros((), dtype=torch.bool),
        "count": torch.zeros((), dtype=torch.int32),
        "none": torch.zeros(0),
    }.items():
        model.register_buffer(name, buffer)
    return model


if __name__ == "__main__":
    main()
