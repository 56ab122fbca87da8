"""Word2Vec: skip-gram with negative sampling (Mikolov et al. 2013, arXiv 1310.4546, equation 4)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import softplus


class SkipGram(nn.Module):
    """Words ``(batch, 1 + candidates)``, int64, to logits ``(batch, candidates)``.

    Column 0 is the middle word, the others are candidates for its neighbour; a logit is the product
    of the middle word's vector (``words``) and the candidate's (``contexts``). Both tables have sparse
    gradients. They begin as published: ``words`` uniform in +-0.5 / dim, ``contexts`` at zero.
    """

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, dim, sparse=True)
        self.contexts = nn.Embedding(vocab, dim, sparse=True)
        nn.init.uniform_(self.words.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.contexts.weight)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits of the candidates."""
        middle, candidates = self.words(words[:, 0]), self.contexts(words[:, 1:])
        return torch.bmm(candidates, middle.unsqueeze(2)).squeeze(2)


def word2vec(vocab: int = 20_000, dim: int = 64) -> nn.Module:
    """``SkipGram`` for the ``vocab`` most frequent words, vectors of ``dim`` numbers."""
    return SkipGram(vocab, dim)


def skip_gram_loss(logits: torch.Tensor, _labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """-log sigmoid(true) - sum over the negatives of log sigmoid(-negative), the true neighbour standing in column 0.

    ``reduction``: ``mean`` or ``sum`` over the batch.
    """
    total = softplus(-logits[:, 0]).sum() + softplus(logits[:, 1:]).sum()
    return total / len(logits) if reduction == "mean" else total
