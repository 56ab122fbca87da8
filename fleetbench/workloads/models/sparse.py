"""Models with embeddings that have sparse gradients.

Wide & Deep (Cheng et al. 2016, arXiv 1606.07792) has the sizes of Fleet's example; Word2Vec is skip-gram with
negative sampling (Mikolov et al. 2013, arXiv 1310.4546, equation 4).
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

NUM_NUMERIC = 13
NUM_CATEGORICAL = 26
"""Number of categorical features. A sample has ``NUM_NUMERIC`` numbers, then the table row of each
categorical feature."""
MOST_ROWS = 2**24
"""Largest number of table rows whose indices float32 holds exactly."""


class WideDeep(nn.Module):
    """Maps samples ``(batch, 39)`` to logits ``(batch,)`` of a click.

    ``wide`` is linear in all features, with one weight per row of the hashed table; ``deep`` is a perceptron
    over the numbers and the rows' vectors. The two tables have sparse gradients.
    """

    def __init__(self, rows: int = 1_000_001, dim: int = 10, hidden: int = 400, depth: int = 3) -> None:
        """Create a table of ``rows`` vectors of ``dim`` numbers, and ``depth`` layers of ``hidden`` units."""
        super().__init__()
        self.wide_rows = nn.EmbeddingBag(rows, 1, mode="sum", sparse=True)
        self.wide = nn.Linear(NUM_NUMERIC, 1)
        self.vectors = nn.Embedding(rows, dim, sparse=True)
        widths = [NUM_NUMERIC + NUM_CATEGORICAL * dim] + [hidden] * depth
        layers: list[nn.Module] = []
        for before, behind in pairwise(widths):
            layers += [nn.Linear(before, behind), nn.ReLU()]
        self.deep = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        nn.init.zeros_(self.wide_rows.weight)
        nn.init.normal_(self.vectors.weight, std=dim**-0.5)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        numbers, rows = samples[:, :NUM_NUMERIC], samples[:, NUM_NUMERIC:].long()
        wide = self.wide_rows(rows) + self.wide(numbers)
        deep = self.deep(torch.cat([numbers, self.vectors(rows).flatten(1)], 1))
        return (wide + deep).squeeze(1)  # type: ignore[no-any-return]  # Module.__call__ is untyped


def click_loss(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the logistic loss of labels 0 and 1; ``reduction`` is ``mean`` or ``sum``."""
    return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction=reduction)


class SkipGram(nn.Module):
    """Maps words ``(batch, 1 + candidates)``, int64, to logits ``(batch, candidates)``.

    Column 0 is the middle word, the others are candidates for its neighbour. A logit is the product of the
    middle word's vector (``words``) and the candidate's (``contexts``). Both tables have sparse gradients.
    They are initialised as published: ``words`` uniformly in +-0.5 / dim, ``contexts`` with zeros.
    """

    def __init__(self, vocab: int = 20_000, dim: int = 64) -> None:
        """Create vectors of ``dim`` numbers for the ``vocab`` most frequent words."""
        super().__init__()
        self.words = nn.Embedding(vocab, dim, sparse=True)
        self.contexts = nn.Embedding(vocab, dim, sparse=True)
        nn.init.uniform_(self.words.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.contexts.weight)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits of the candidates."""
        middle, candidates = self.words(words[:, 0]), self.contexts(words[:, 1:])
        return torch.bmm(candidates, middle.unsqueeze(2)).squeeze(2)


def skip_gram_loss(logits: torch.Tensor, _labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return -log sigmoid(true) - sum over negatives of log sigmoid(-negative).

    Column 0 of ``logits`` is the true neighbour, the others are negatives. ``reduction`` is ``mean`` or
    ``sum`` over the batch.
    """
    total = softplus(-logits[:, 0]).sum() + softplus(logits[:, 1:]).sum()
    return total / len(logits) if reduction == "mean" else total
