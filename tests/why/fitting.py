"""A library's loop, for tests: it wraps the model, and trains within the optimizer's closure, as Lightning does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def fit(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    """Train until the process is ended."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in itertools.count():

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = ddp(batch(step)).square().mean()
            loss.backward()
            time.sleep(0.01)  # what else it does, such as logging
            return loss.item()

        optimizer.step(closure)
