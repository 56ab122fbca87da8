"""Held-out metrics: what a trained model is worth on the split that it did not learn from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fleetbench.workloads.data.data import best_auc, held_out
from fleetbench.workloads.metrics import auc
from fleetbench.workloads.models.registry import INPUTS, loss_of

_SAMPLES = 512
"""In one forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Of one model on the held-out split."""

    loss: float
    """Mean over the samples."""
    auc: float | None
    """Of clicks; none for other data."""
    best_auc: float | None
    """What no model is expected to exceed; none where nobody knows it."""


@torch.no_grad()
def held_out_metrics(model: torch.nn.Module, name: str, folder: Path) -> HeldOut:
    """Metrics of a registry model called ``name``, as it is, on the data that ``data.prepare`` wrote to ``folder``."""
    inputs, labels = held_out(folder)
    device = next(model.parameters()).device
    training, compare = model.training, loss_of(name)
    model.eval()
    outputs = torch.cat([model(some.to(device)).cpu() for some in inputs.split(_SAMPLES)])
    model.train(training)
    clicks = INPUTS[name] == "clicks"
    return HeldOut(
        loss=float(compare(outputs, labels)),
        auc=auc(labels.numpy(), outputs.numpy()) if clicks else None,
        best_auc=best_auc(folder),
    )
