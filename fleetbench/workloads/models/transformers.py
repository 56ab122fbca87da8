"""Transformers: BERT (Devlin et al. 2018, arXiv 1810.04805), an encoder with a classifier, and GPT-2 (Radford et al. 2019), a decoder."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

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

    def __init__(self, vocab: int = 50257, hidden: int = 768, layers: int = 12, heads: int = 12, positions: int = 1024) -> None:
        """By default the small GPT-2 of 124,439,808 parameters. ``heads`` divides ``hidden``."""
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


def next_token_loss(costs: torch.Tensor, _labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Of ``Gpt``: the mean over tokens; ``reduction``: ``mean`` or ``sum`` over the batch."""
    total = costs.mean(1).sum()
    return total / len(costs) if reduction == "mean" else total
