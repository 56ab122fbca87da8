"""accumulation_plain.py with fleet's four lines: ``torchrun --nproc-per-node 2 examples/accumulation.py [STRATEGY.toml]``."""

import contextlib
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

EPOCHS, BATCH, ACCUMULATE = 10, 16, 2

inputs, labels = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(labels))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

fleet.init(DistributedStrategy.load(sys.argv[1]) if len(sys.argv) > 1 else None)
model = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(optimizer)

sampler = torch.utils.data.DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), drop_last=True)
loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, drop_last=True)
number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        number += 1
        with contextlib.nullcontext() if number % ACCUMULATE == 0 else fleet.no_sync():  # the last of them exchanges the sum
            loss = cross_entropy(model(batch), target) / ACCUMULATE
            loss.backward()
        if number % ACCUMULATE == 0:
            fleet.report(loss=ACCUMULATE * loss)  # for a target, which local steps need
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if fleet.is_first_worker():
        print(f"[Epoch {epoch}] loss: {ACCUMULATE * loss.item():.5f}")
fleet.synchronize()  # between two averagings of Local SGD the trainers' parameters differ
