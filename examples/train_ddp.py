"""A training script of plain DistributedDataParallel, with a loader that is slow on rank 1: fleetbench why says so.

torchrun --nproc-per-node 2 examples/train_ddp.py
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, WIDTH = 2000, 64, 256
READS_S = 0.01  # what rank 1 waits for its storage per batch


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random images of ten classes."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if dist.get_rank() == 1 and index % BATCH == 0:
            time.sleep(READS_S)
        return torch.full((WIDTH,), index % 7 / 7), torch.tensor(index % 10)


def main() -> None:
    """Train until the data end."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for images, classes in torch.utils.data.DataLoader(Images(), batch_size=BATCH):
        cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
