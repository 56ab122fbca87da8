"""Metrics of a trained model beside its loss: the area under the ROC curve, and a word's nearest neighbours."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Probability that a sample of label 1 scores above one of label 0, equal scores counting half; NaN where a label is missing."""
    positive = np.asarray(labels, dtype=np.float64)
    return weighted_auc(positive, 1.0 - positive, scores)


def planted_auc(probabilities: npt.ArrayLike) -> float:
    """AUC that is expected of scores in the order of the probabilities that the labels are drawn with: the best there is.

    Exactly: the expected number of pairs in the right order over the expected number of pairs.
    """
    chance = np.asarray(probabilities, dtype=np.float64)
    itself = float((chance * (1.0 - chance)).sum())  # no sample makes a pair with itself
    pairs = float(chance.sum() * (1.0 - chance).sum())
    return (weighted_auc(chance, 1.0 - chance, chance) * pairs - itself / 2) / (pairs - itself)


def weighted_auc(positive: npt.ArrayLike, negative: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """AUC where each sample counts ``positive`` times as label 1 and ``negative`` times as label 0."""
    distinct, place = np.unique(np.asarray(scores), return_inverse=True)
    above, below = (np.bincount(place.reshape(-1), np.asarray(weight, dtype=np.float64), len(distinct)) for weight in (positive, negative))
    pairs = above.sum() * below.sum()
    return float((above * (np.cumsum(below) - below / 2)).sum() / pairs) if pairs else float("nan")


def nearest(vectors: torch.Tensor, word: int, number: int) -> Integers:
    """The ``number`` rows of ``vectors``, ``(words, dim)``, of largest cosine with row ``word``, itself left out; nearest first."""
    unit = torch.nn.functional.normalize(vectors.detach().double(), dim=1)
    cosine = unit @ unit[word]
    cosine[word] = -torch.inf
    return cosine.topk(number).indices.numpy()
