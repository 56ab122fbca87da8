"""A training of plain DistributedDataParallel with a fault planted in it; prints its mean step in ms at the end."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="none")
parser.add_argument("--size", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--depth", type=int, default=6)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--bucket-mb", type=float)
options = parser.parse_args()
fault, size = options.fault, options.size
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(options.threads)
torch.set_flush_denormal(True)


class Batches(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random images; a batch is made at once."""

    def __len__(self) -> int:
        return 10**9

    def __getitems__(self, numbers: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if fault == "loader_all" or (fault == "loader_one" and rank == 1):
            time.sleep(size * 1e-3)
        num = round(len(numbers) * size) if fault == "uneven" and rank == 1 else len(numbers)
        return list(zip(torch.randn(num, options.width), torch.randint(0, 10, (num,)), strict=True))


class Net(nn.Module):
    """Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(options.depth) for layer in (nn.Linear(options.width, options.width), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(options.width, 10))
        if fault == "buffers":
            self.register_buffer("table", torch.zeros(round(size * 250_000)))  # MB

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Classes of images."""
        if fault == "slow_rank" and rank == 1:
            time.sleep(size * 1e-3)
        return self.layers(images)


settings = {"find_unused_parameters": True} if fault == "unused" else {}
if options.bucket_mb is not None:
    settings["bucket_cap_mb"] = options.bucket_mb
model = DistributedDataParallel(Net(), **settings)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
began = time.perf_counter()
for step, (images, classes) in enumerate(torch.utils.data.DataLoader(Batches(), batch_size=options.batch)):
    if step == options.steps:
        break
    if step == 5:
        began = time.perf_counter()
    cross_entropy(model(images), classes).backward()
    optimizer.step()
    optimizer.zero_grad()
    if fault == "checkpoint" and step % 10 == 0:
        if rank == 0:
            torch.save(model.state_dict(), "/dev/null")
            time.sleep(size * 1e-3)
        dist.barrier()
if rank == 0:
    print(f"step_ms {1e3 * (time.perf_counter() - began) / (options.steps - 5):.4f}", flush=True)
dist.destroy_process_group()
