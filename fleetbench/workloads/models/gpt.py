"""GPT-2 (Radford et al. 2019): a decoder of pre-normalised blocks, on torch's fused causal attention."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

_INITIAL_STD = 0.02


class Block(nn.Module):
    """Attention and a perceptron of 4 ``hidden``, each after a normalisation and around a shortcut."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``(batch, length, hidden)`` to as much."""
        batch, length, hidden = inputs.shape
        parts = self.attention(self.norm1(inputs)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.projection(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return inputs + self.down(gelu(self.up(self.norm2(inputs)), approximate="tanh"))  # type: ignore[no-any-return]  # Module.__call__ is untyped


class Gpt(nn.Module):
    """Tokens ``(batch, length)``, int64, to what each but the first costs given those before it: ``(batch, length - 1)``, float32.

    The output layer's weight is the embedding's.
    """

    def __init__(self, vocab: int, hidden: int, layers: int, heads: int, positions: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Cross-entropies."""
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)[:, :-1])
        return (
            cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1).to(self.norm.weight.dtype)
        )


def gpt(vocab: int = 50257, hidden: int = 768, layers: int = 12, heads: int = 12, positions: int = 1024) -> nn.Module:
    """GPT-2; by default the small one of 124,439,808 parameters. ``heads`` divides ``hidden``."""
    return Gpt(vocab, hidden, layers, heads, positions)


def next_token_loss(costs: torch.Tensor, _labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Of ``Gpt``: the mean over tokens; ``reduction``: ``mean`` or ``sum`` over the batch."""
    total = costs.mean(1).sum()
    return total / len(costs) if reduction == "mean" else total
