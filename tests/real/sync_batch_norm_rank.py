"""One rank of the tests of synchronised batch norm: a layer on its part of joint batches, then the layer undone.

``sync_batch_norm_rank.py RANK RANKS STORE OUTPUT NAMES``: the cases and strategies of these names, a list as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fleetbench.strategy import DistributedStrategy
from real.compute.compute import apply_compute
from real.compute.sync_batch_norm import apply_sync_batch_norm

STEPS = 3
CHANNELS = 4


@dataclass(frozen=True)
class Case:
    """A kind of batch norm and the data that it sees."""

    kind: type[nn.Module]
    shape: tuple[int, ...] = ()
    """Of one sample's channel."""
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (3, 5, 2)
    """Samples of each rank."""
    mean: float = 0.5
    tolerance: float = 1e-10
    """Of what is of the order of one; larger values have it relative to their largest."""

    def layer(self) -> nn.Module:
        """The layer, with a weight and a bias that differ by channel."""
        layer = self.kind(CHANNELS, **self.options)
        with torch.no_grad():
            for number, parameter in enumerate(layer.parameters(), start=1):
                parameter.copy_(torch.linspace(0.5, number, CHANNELS))
        return layer if self.dtype == torch.float16 else layer.to(self.dtype)

    def joint(self, step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of all ranks at a step, and what the loss multiplies the outputs by."""
        generator = torch.Generator().manual_seed(step)
        size = (sum(self.batches[:ranks]), CHANNELS, *self.shape)
        scale = torch.linspace(1.0, 2.0, CHANNELS, dtype=torch.float64).view(1, -1, *([1] * len(self.shape)))
        inputs = torch.randn(size, generator=generator, dtype=torch.float64) * scale + self.mean
        return inputs.to(self.dtype), torch.randn(size, generator=generator, dtype=torch.float64).to(self.dtype)

    def own(self, rank: int) -> slice:
        """Where a rank's samples lie in the joint batch."""
        begin = sum(self.batches[:rank])
        return slice(begin, begin + self.batches[rank])


CASES = {
    "1d": Case(nn.BatchNorm1d),
    "1d of sequences": Case(nn.BatchNorm1d, (7,)),
    "2d": Case(nn.BatchNorm2d, (3, 5)),
    "3d": Case(nn.BatchNorm3d, (2, 3, 2)),
    "no affine": Case(nn.BatchNorm2d, (3, 3), options={"affine": False}),
    "cumulative average": Case(nn.BatchNorm2d, (3, 3), options={"momentum": None}),
    "no statistics": Case(nn.BatchNorm2d, (3, 3), options={"track_running_stats": False}),
    "an empty batch": Case(nn.BatchNorm1d, batches=(4, 0, 3)),
    "one sample a rank": Case(nn.BatchNorm1d, batches=(1, 1, 1)),
    "float32": Case(nn.BatchNorm2d, (3, 5), torch.float32, tolerance=1e-5),
    # a float32 near 3e4 is known to 2e-3; the difference of sums of squares would be off by fifty
    "float32 far from zero": Case(nn.BatchNorm2d, (8, 8), torch.float32, batches=(8, 9, 10), mean=3e4, tolerance=5e-3),
    # the sum of the values of a channel, let alone of their squares, is more than half precision holds
    "half precision": Case(nn.BatchNorm2d, (16, 16), torch.float16, batches=(8, 9, 10), mean=20.0, tolerance=4e-3),
}


def loss_of(outputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A sum over samples whose gradient depends on the outputs."""
    return (outputs.double() * factors.double() + outputs.double() ** 3 / 3).sum()


def train(layer: nn.Module, inputs: torch.Tensor, factors: torch.Tensor) -> dict[str, Any]:
    """One step: outputs, gradients of inputs and parameters, and the statistics after it."""
    inputs = inputs.clone().requires_grad_()
    layer.zero_grad()
    outputs = layer(inputs)
    loss_of(outputs, factors).backward()
    assert inputs.grad is not None
    assert outputs.dtype == inputs.dtype
    found = {"outputs": outputs.detach(), "inputs.grad": inputs.grad}
    found |= {f"{name}.grad": parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    found |= {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return {name: tensor.numpy() for name, tensor in found.items()}


def network() -> nn.Module:
    """Two convolutions with batch norms, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        stem = nn.Sequential(nn.Conv2d(CHANNELS, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        return nn.Sequential(stem, nn.Sequential(nn.Conv2d(6, 5, 2), nn.BatchNorm2d(5), nn.Tanh()), nn.Flatten()).double()


NETWORK = Case(nn.Identity, (6, 5))
STRATEGIES = {
    "alone": {},
    "recomputed": {"recompute": True, "recompute_configs": {"checkpoints": ["0", "1.1"]}},
    "compiled and recomputed": {
        "build_strategy": {"fuse_bn_act_ops": True},
        "recompute": True,
        "recompute_configs": {"checkpoints": ["1"]},
    },
}


def main() -> None:
    """Run every case, and save what each left over under ``CASE/STEP/...``."""
    rank, ranks, store, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert group is not None
    saved: dict[str, Any] = {}
    chosen = json.loads(sys.argv[5])
    for name, case in ((name, case) for name, case in CASES.items() if name in chosen):
        layer = case.layer()
        undo = apply_sync_batch_norm(layer, group)
        for step in range(STEPS):
            inputs, factors = case.joint(step, ranks)
            saved |= {f"{name}/{step}/{key}": value for key, value in train(layer, inputs[case.own(rank)], factors[case.own(rank)]).items()}
        layer.eval()
        saved[f"{name}/eval"] = layer(case.joint(STEPS, ranks)[0]).detach().numpy()
        undo()
        undo()
        assert type(layer) is case.kind
        assert layer.__dict__.keys() == case.layer().__dict__.keys()
    for name, strategy in ((name, strategy) for name, strategy in STRATEGIES.items() if name in chosen):
        model = network()
        undo = apply_compute(
            model,
            DistributedStrategy.from_dict({"sync_batch_norm": True, **strategy}),
            device=torch.device("cpu"),
            group=group,
            scale=lambda: 1.0,
            backend="aot_eager",
        )
        for step in range(STEPS):
            inputs, factors = NETWORK.joint(step, ranks)
            mine = NETWORK.own(rank)
            factors = factors.flatten(1)[mine, :30]
            saved |= {f"network {name}/{step}/{key}": value for key, value in train(model, inputs[mine], factors).items()}
        undo()
    np.savez(output, **saved)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
