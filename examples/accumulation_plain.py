"""A script for one process that accumulates gradients by itself: an update from every second batch, clipped."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

EPOCHS, BATCH, ACCUMULATE = 10, 16, 2

inputs, labels = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(labels))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)
number = 0
for epoch in range(EPOCHS):
    for batch, target in loader:
        number += 1
        loss = cross_entropy(model(batch), target) / ACCUMULATE
        loss.backward()
        if number % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"[Epoch {epoch}] loss: {ACCUMULATE * loss.item():.5f}")
