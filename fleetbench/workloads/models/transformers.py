"""Transformers: BERT, an encoder with a classifier, and the decoders GPT-2 and Llama.

Sources: Devlin et al. 2018, arXiv 1810.04805; Radford et al. 2019; Touvron et al. 2023, arXiv 2302.13971.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu

_INITIAL_STD = 0.02
_EPSILON = 1e-12


class BertEncoder(nn.Module):
    """Maps tokens ``(batch, length)``, int64, to the pooled first position ``(batch, hidden)``.

    There is no dropout, so that a step depends only on parameters and data, and all tokens are in the first
    segment. Otherwise as published: GELU, normalisation after each part, learned positions.
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
        """Return the pooled first position."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        segment = torch.zeros_like(position)
        embedded = self.word_embeddings(tokens) + self.position_embeddings(position) + self.segment_embeddings(segment)
        return torch.tanh(self.pooler(self.encoder(self.norm(embedded))[:, 0]))


class Bert(nn.Module):
    """Maps tokens ``(batch, length)``, int64, to logits ``(batch, classes)``."""

    def __init__(self, encoder: BertEncoder, hidden: int, classes: int) -> None:
        super().__init__()
        self.bert = encoder
        self.classifier = nn.Linear(hidden, classes)
        _initialise(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.classifier(self.bert(tokens))  # type: ignore[no-any-return]  # Module.__call__ is untyped


def bert_base(
    vocab: int = 30522, hidden: int = 768, layers: int = 12, heads: int = 12, ffn: int = 3072, positions: int = 512, classes: int = 2
) -> nn.Module:
    """Return BERT-base with a classifier on its pooler.

    The encoder with its pooler has 109,482,240 parameters. Tokens are ``(batch, length)``, int64, with a
    length of at most ``positions``, which belongs to the data (``workload.data_options.length``). ``heads``
    divides ``hidden``.
    """
    return Bert(BertEncoder(vocab, hidden, layers, heads, ffn, positions), hidden, classes)


class Block(nn.Module):
    """Attention and a perceptron with 4 ``hidden`` units, each after a normalisation and with a shortcut around it."""

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
        """Map ``(batch, length, hidden)`` to the same shape."""
        batch, length, hidden = inputs.shape
        parts = self.attention(self.norm1(inputs)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.projection(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return inputs + self.down(gelu(self.up(self.norm2(inputs)), approximate="tanh"))  # type: ignore[no-any-return]  # Module.__call__ is untyped


class Gpt(nn.Module):
    """Maps tokens ``(batch, length)``, int64, to cross-entropies ``(batch, length - 1)``, float32.

    The output layer shares the embedding's weight.
    """

    def __init__(self, vocab: int = 50257, hidden: int = 768, layers: int = 12, heads: int = 12, positions: int = 1024) -> None:
        """Create GPT-2; the default is its smallest version, with 124,439,808 parameters.

        ``heads`` divides ``hidden``.
        """
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight
        _initialise(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropies ``(batch, length - 1)`` of all tokens except the first."""
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        return _costs(self.head(self.norm(hidden)[:, :-1]), tokens).to(self.norm.weight.dtype)


def _costs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropies ``(batch, length - 1)`` of all tokens except the first."""
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


class LlamaBlock(nn.Module):
    """Attention with groups of heads that share keys and values, and a gated perceptron.

    Each has an RMS norm before it and a shortcut around it.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_size: int, ffn: int, *, qkv_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.head_size = head_size
        self.norm1 = nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, heads * head_size, bias=qkv_bias)
        self.key = nn.Linear(hidden, kv_heads * head_size, bias=qkv_bias)
        self.value = nn.Linear(hidden, kv_heads * head_size, bias=qkv_bias)
        self.query_norm, self.key_norm = (nn.RMSNorm(head_size) if qk_norm else nn.Identity() for _ in range(2))
        self.output = nn.Linear(heads * head_size, hidden, bias=False)
        self.norm2 = nn.RMSNorm(hidden)
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, inputs: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Map ``(batch, length, hidden)`` to the same shape.

        ``angles`` are those of the rotary positions, ``(length, head_size / 2)``.
        """
        batch, length, _ = inputs.shape
        normed = self.norm1(inputs)
        query, key, value = (
            part(normed).view(batch, length, -1, self.head_size).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = _rotated(self.query_norm(query), angles), _rotated(self.key_norm(key), angles)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
        inputs = inputs + self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.norm2(inputs)
        return inputs + self.down(silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]  # Module.__call__ is untyped


def _rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate heads ``(..., length, size)``: numbers i and i + size / 2 by angle i of their position."""
    left, right = heads.chunk(2, -1)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Llama(nn.Module):
    """Maps tokens to cross-entropies as ``Gpt`` does: a decoder like Llama, Mistral and Qwen.

    Positions are encoded by rotary embeddings.
    """

    def __init__(  # noqa: PLR0913  # a model's options
        self,
        *,
        vocab: int = 128256,
        hidden: int = 2048,
        layers: int = 16,
        heads: int = 32,
        kv_heads: int = 8,
        head_size: int = 64,
        ffn: int = 8192,
        positions: int = 131072,
        tied: bool = True,  # options are passed by name
        qkv_bias: bool = False,  # as above
        qk_norm: bool = False,  # as above
    ) -> None:
        """Create Llama; the default is Llama 3.2 with 1,235,814,400 parameters.

        ``kv_heads`` divides ``heads``. The base of the rotary angles is 10,000.
        """
        super().__init__()
        self.positions, self.head_size = positions, head_size
        self.tokens = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(
            LlamaBlock(hidden, heads, kv_heads, head_size, ffn, qkv_bias=qkv_bias, qk_norm=qk_norm) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        _initialise(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropies."""
        hidden = self.tokens(tokens)
        rates = 1e4 ** -(torch.arange(0, self.head_size, 2, device=tokens.device, dtype=hidden.dtype) / self.head_size)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device, dtype=hidden.dtype), rates)
        for block in self.blocks:
            hidden = block(hidden, angles)
        return _costs(self.head(self.norm(hidden)[:, :-1]), tokens).to(self.norm.weight.dtype)


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_INITIAL_STD)
        if isinstance(module, nn.MultiheadAttention):
            nn.init.normal_(module.in_proj_weight, std=_INITIAL_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def next_token_loss(costs: torch.Tensor, _labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the loss of a decoder, the mean over tokens.

    ``reduction`` is ``mean`` or ``sum`` over the batch.
    """
    total = costs.mean(1).sum()
    return total / len(costs) if reduction == "mean" else total
