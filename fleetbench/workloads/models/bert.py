"""BERT (Devlin et al. 2018, arXiv 1810.04805), on torch's own transformer encoder, with a classifier."""

from __future__ import annotations

import torch
from torch import nn

_INITIAL_STD = 0.02
_EPSILON = 1e-12


class BertEncoder(nn.Module):
    """Tokens ``(batch, length)``, int64, to the pooled first position ``(batch, hidden)``.

    No dropout, so that a step is a function of parameters and data alone, and every token is of
    the first segment. As published otherwise: GELU, normalisation after each part, learned positions.
    """

    def __init__(self, vocab: int, hidden: int, layers: int, heads: int, ffn: int, positions: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.position_embeddings = nn.Embedding(positions, hidden)
        self.segment_embeddings = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=_EPSILON)
        layer = nn.TransformerEncoderLayer(hidden, heads, ffn, dropout=0.0, activation="gelu", layer_norm_eps=_EPSILON, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pooler = nn.Linear(hidden, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The pooled first position."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        segment = torch.zeros_like(position)
        embedded = self.word_embeddings(tokens) + self.position_embeddings(position) + self.segment_embeddings(segment)
        return torch.tanh(self.pooler(self.encoder(self.norm(embedded))[:, 0]))


class Bert(nn.Module):
    """Tokens ``(batch, length)``, int64, to logits ``(batch, classes)``."""

    def __init__(self, encoder: BertEncoder, hidden: int, classes: int) -> None:
        super().__init__()
        self.bert = encoder
        self.classifier = nn.Linear(hidden, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INITIAL_STD)
            if isinstance(module, nn.MultiheadAttention):
                nn.init.normal_(module.in_proj_weight, std=_INITIAL_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.classifier(self.bert(tokens))  # type: ignore[no-any-return]  # Module.__call__ is untyped


def bert_base(
    vocab: int = 30522, hidden: int = 768, layers: int = 12, heads: int = 12, ffn: int = 3072, positions: int = 512, classes: int = 2
) -> nn.Module:
    """BERT-base with a classifier on its pooler; 109,482,240 parameters in the encoder with its pooler.

    Tokens ``(batch, length)``, int64, at most ``positions`` of them; the length belongs to the data
    (``workload.data_options.length``). ``heads`` divides ``hidden``.
    """
    return Bert(BertEncoder(vocab, hidden, layers, heads, ffn, positions), hidden, classes)
