"""A training script for one process: handwritten digits of 8 by 8 pixels, which scikit-learn brings along."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

EPOCHS, BATCH = 10, 32

inputs, labels = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(labels))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)
for epoch in range(EPOCHS):
    for batch, target in loader:
        loss = cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"[Epoch {epoch}] loss: {loss.item():.5f}")
