"""Held-out metrics: what a trained model is worth on the split that it did not learn from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import roc_auc_score

from fleetbench.workloads.data.data import held_out
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
        auc=float(roc_auc_score(labels.numpy(), outputs.numpy())) if clicks else None,
        best_auc=planted_auc(np.load(planted)) if (planted := folder / "planted_eval.npy").exists() else None,
    )


def nearest(vectors: torch.Tensor, word: int, number: int) -> list[int]:
    """The ``number`` rows of ``vectors``, ``(words, dim)``, of largest cosine with row ``word``, itself left out; nearest first."""
    unit = torch.nn.functional.normalize(vectors.detach().double(), dim=1)
    cosine = unit @ unit[word]
    cosine[word] = -torch.inf
    return [int(row) for row in cosine.topk(number).indices]


def planted_auc(probabilities: npt.ArrayLike) -> float:
    """AUC that is expected of scores in the order of the probabilities that the labels are drawn with: the best there is.

    Exactly: the expected number of pairs in the right order over the expected number of pairs.
    """
    chance = np.asarray(probabilities, dtype=np.float64)
    labels, weights = np.repeat([1, 0], len(chance)), np.concatenate([chance, 1.0 - chance])
    itself = float((chance * (1.0 - chance)).sum())  # no sample makes a pair with itself
    pairs = float(chance.sum() * (1.0 - chance).sum())
    return (float(roc_auc_score(labels, np.tile(chance, 2), sample_weight=weights)) * pairs - itself / 2) / (pairs - itself)
