"""A tabular regression as a user would write it: ``fleetbench launch --nproc 2 reports/tuner/regression.py [STRATEGY.toml]``.

An MLP with Adam, a learning-rate schedule and clipped gradients. The data are synthetic: a fixed nonlinear function of 32
features, plus noise. ``FLEETBENCH_SEED`` sets the initial parameters and the order of the data, not the data.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleetbench import DistributedStrategy, fleet

FEATURES, SAMPLES, HELD_OUT = 32, 8192, 2048
STEPS, BATCH, WARMUP = 400, 32, 20  # optimizer steps; samples per trainer and step; optimizer steps
WIDTH, LEARNING_RATE, MAX_NORM = 512, 1e-4, 1.0


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Features [SAMPLES + HELD_OUT, FEATURES] and targets [SAMPLES + HELD_OUT, 1] of variance 1, the noise's 0.05 included."""
    generator = torch.Generator().manual_seed(2024)
    x = torch.randn(SAMPLES + HELD_OUT, FEATURES, generator=generator)
    directions = torch.randn(FEATURES, 12, generator=generator) / FEATURES**0.5
    z = x @ directions
    y = torch.sin(2 * z[:, :4]).sum(1) + (z[:, 4:8] * z[:, 8:]).sum(1) + z[:, 0].abs() + z[:, 4]
    y = (y - y.mean()) / y.std()
    return x, (0.95**0.5 * y + 0.05**0.5 * torch.randn(len(y), generator=generator)).unsqueeze(1)


def main() -> None:
    """Train for STEPS optimizer steps. Rank 0 prints the held-out loss."""
    seed = int(os.environ.get("FLEETBENCH_SEED", "0"))
    torch.manual_seed(seed)
    x, y = make_data()
    layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    fleet.init(DistributedStrategy.load(sys.argv[1]) if len(sys.argv) > 1 else DistributedStrategy())
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))

    data = TensorDataset(x[:SAMPLES], y[:SAMPLES])
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, fleet.worker_num(), fleet.worker_index(), seed=seed, drop_last=True
    )
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    criterion = nn.MSELoss()
    step = epoch = 0
    while step < STEPS:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            fleet.report(loss=loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step == STEPS:
                break
        epoch += 1

    fleet.synchronize()  # between two averagings of Local SGD the trainers' parameters differ
    model.eval()
    with torch.no_grad():
        held_out = criterion(model(x[SAMPLES:]), y[SAMPLES:]).item()
    if fleet.is_first_worker():
        print(f"held-out loss after {step} steps: {held_out:.4f}")


if __name__ == "__main__":
    main()
