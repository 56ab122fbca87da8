"""A training script with fleet's four lines: ``fleetbench launch --nproc 2 examples/train_digits.py [STRATEGY.toml]``.

Without a launcher it trains alone. Give it the ``recommended.toml`` of a tuning as its argument.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

EPOCHS, BATCH = 10, 32

inputs, labels = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(labels))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

strategy = DistributedStrategy.load(sys.argv[1]) if len(sys.argv) > 1 else DistributedStrategy()
fleet.init(strategy)
model = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(optimizer)

# Every trainer reads its own part, and all parts have the same number of batches.
sampler = torch.utils.data.DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), drop_last=True)
loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, drop_last=True)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        loss = cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if fleet.is_first_worker():
        print(f"[Epoch {epoch}] loss: {loss.item():.5f}")
fleet.synchronize()  # between two averagings of Local SGD the trainers' parameters differ
