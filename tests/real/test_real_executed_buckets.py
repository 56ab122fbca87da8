from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from zero_trainer import ZeroTrainer

from fleetbench.plan.fusion import Cost
from fleetbench.strategy import DistributedStrategy
from real.communication.lanes import Started
from real.engine.engine import Engine

Model = tuple[nn.Module, torch.Tensor]


class Recorder(ZeroTrainer):
    """Keeps the address and the numbers of what is averaged, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[tuple[int, int]] = []

    def start_average(self, tensor: torch.Tensor, communicator: int, ended: Callable[[], None] | None, group: str = "world") -> Started:
        """See ``ZeroTrainer``."""
        self.carried.append((tensor.data_ptr(), tensor.numel()))
        return super().start_average(tensor, communicator, ended, group)


class Mixed(nn.Module):
    """Layers of two types in turns, a tied weight, and one in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(nn.Linear(16, 16).to(torch.float64 if index % 2 else torch.float32) for index in range(6))
        self.layers[4].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers of the last layer's type."""
        x = self.conv(x).flatten(1)[:, :16]
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


def deep() -> Model:
    """242 small tensors."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(121))), torch.ones(2, 8)


def wide() -> Model:
    """Two large tensors and their biases."""
    return nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64)), torch.ones(2, 64)


def conv() -> Model:
    """Convolutions and batch norms."""
    layers = [layer for width in (3, 8, 16, 16) for layer in (nn.LazyConv2d(2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())]
    model, images = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)), torch.ones(2, 3, 8, 8)
    model(images)
    return model, images


def transformer() -> Model:
    """Attention, layer norms, and feed-forward layers used in another order than that of their registration."""
    return nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True, norm_first=True), torch.ones(2, 4, 16)


def mixed() -> Model:
    """See ``Mixed``."""
    return Mixed(), torch.ones(2, 3, 8, 8)


FUSIONS: dict[str, dict[str, object]] = {
    "default": {},
    "one by one": {"fuse_all_reduce_ops": False},
    "by size": {"fuse_grad_size_in_MB": 0.01},
    "as DDP": {"fusion": "ddp", "fuse_grad_size_in_MB": 0.02, "first_bucket_size_in_MB": 0.005},
    "by number": {"fusion": "by_number", "fuse_grad_size_in_num": 3},
    "merged gradient": {"fusion": "merged_gradient"},
    "optimal": {"fusion": "optimal", "sync_nccl_allreduce": False, "nccl_comm_num": 2},
}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Another trainer that notes what it is given."""
    fake = Recorder()
    yield fake
    fake.close()


@pytest.mark.sample(4)
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("make", [deep, wide, conv, transformer, mixed])
def test_buckets_are_executed_as_planned(recorder: Recorder, make: Callable[[], Model], fusion: str) -> None:
    """In every step what travels is, in order and in size, the plan's buckets, whose memory is that of their parameters' ``.grad``."""
    torch.manual_seed(0)
    model, inputs = make()
    strategy = DistributedStrategy(**FUSIONS[fusion])  # type: ignore[arg-type]  # fields of every type
    engine = Engine(model, strategy, recorder, forecast=(Cost(latency_ns=20_000, ns_per_byte=5.0), {}))  # type: ignore[arg-type]  # a fake
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    named = dict(model.named_parameters())
    for _ in range(4):
        recorder.carried.clear()
        plan = engine.plan
        model(inputs).sum().backward()
        assert [numel for _, numel in recorder.carried] == [bucket.numel for bucket in plan.buckets]
        for (address, numel), bucket in zip(recorder.carried, plan.buckets, strict=True):
            offsets = []
            for name in bucket.gradients:
                gradient = named[name].grad
                assert gradient is not None
                offsets.append((gradient.data_ptr() - address) // gradient.element_size())
            assert offsets == [sum(named[before].numel() for before in bucket.gradients[:place]) for place in range(len(offsets))]
            assert sum(named[name].numel() for name in bucket.gradients) == numel
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
