"""The models of the published runs, as their authors built them, for ``fit.py``.

BERT as NVIDIA's DeepLearningExamples build it: attention of single matrix products, dropout, a head for masked words (20 or 80 of them) or
for SQuAD. GPT without fused attention as its authors ran it (nanoGPT's first steps, Megatron-LM in vTrain), otherwise fused.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from fleetbench.workloads.models.registry import MODELS, loss_of
from fleetbench.workloads.models.resnet import resnet50


class Attention(nn.Module):
    """Of ``heads``; ``fused``: one kernel."""

    def __init__(self, hidden: int, heads: int, *, fused: bool, causal: bool, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.fused, self.causal = heads, fused, causal
        self.inputs = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.outputs = nn.Linear(hidden, hidden, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``(batch, length, hidden)`` to as much."""
        batch, length, hidden = inputs.shape
        parts = self.inputs(inputs).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            scores = query @ key.transpose(-2, -1) * (hidden // self.heads) ** -0.5
            scores = scores + torch.zeros(length, length, dtype=scores.dtype)  # the mask
            mixed = self.dropout(scores.softmax(-1)) @ value
        return self.outputs(mixed.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """A transformer's layer, normalised before its parts (GPT) or after them (BERT)."""

    def __init__(self, hidden: int, heads: int, *, before: bool, fused: bool, dropout: float, bias: bool = True) -> None:
        super().__init__()
        self.before = before
        self.attention = Attention(hidden, heads, fused=fused, causal=before, dropout=dropout, bias=bias)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=bias), nn.Linear(4 * hidden, hidden, bias=bias)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.dropout, self.gelu = nn.Dropout(dropout), nn.GELU()

    def _part(self, inputs: torch.Tensor, norm: nn.Module, part: nn.Module) -> torch.Tensor:
        if self.before:
            return inputs + self.dropout(part(norm(inputs)))
        return norm(inputs + self.dropout(part(inputs)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``(batch, length, hidden)`` to as much."""
        inputs = self._part(inputs, self.norm1, self.attention)
        return self._part(inputs, self.norm2, nn.Sequential(self.up, self.gelu, self.down))


class Transformer(nn.Module):
    """Tokens to a loss. ``masked`` words of a sample are predicted; 0: SQuAD's two numbers a token; -1: every next token."""

    def __init__(self, vocab: int, hidden: int, layers: int, heads: int, length: int, masked: int, *, fused: bool, dropout: float) -> None:
        super().__init__()
        self.masked, is_gpt = masked, masked < 0
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)
        self.norm, self.dropout = nn.LayerNorm(hidden), nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(hidden, heads, before=is_gpt, fused=fused, dropout=dropout) for _ in range(layers)))
        self.transform = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden)) if masked > 0 else nn.Identity()
        self.head = nn.Linear(hidden, vocab if masked else 2, bias=not is_gpt)
        if masked:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.dropout(self.norm(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))))
        hidden = self.blocks(hidden)
        if self.masked > 0:
            logits = self.head(self.transform(hidden[:, : self.masked].reshape(-1, hidden.shape[-1])))
            return cross_entropy(logits, tokens[:, : self.masked].reshape(-1))
        if self.masked < 0:
            return cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())
        starts, ends = self.head(hidden).unbind(-1)
        return cross_entropy(starts, tokens[:, 0]) + cross_entropy(ends, tokens[:, 0])


class Classified(nn.Module):
    """ResNet-50 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = resnet50()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return cross_entropy(self.model(images), torch.zeros(len(images), dtype=torch.int64))


SIZES = {  # hidden, layers, heads, vocabulary
    "bert-base": (768, 12, 12, 30528),
    "bert-large": (1024, 24, 16, 30528),
    "gpt-124m": (768, 12, 12, 50257),
    "mpt-125m": (768, 12, 12, 50368),
    "mpt-350m": (1024, 24, 16, 50368),
    "mpt-760m": (1536, 24, 12, 50368),
    "mpt-1b": (2048, 24, 16, 50368),
    "mpt-3b": (2560, 32, 20, 50368),
    "gpt-1024-12": (1024, 12, 16, 51200),
    "gpt-1024-24": (1024, 24, 16, 51200),
    "gpt-2048-16": (2048, 16, 16, 51200),
    "gpt-2048-20": (2048, 20, 16, 51200),
}
"""Of the runs' own configurations: BERT's paper (vocabulary padded), GPT-2's, llm-foundry's, vTrain's table."""


REGISTRY: dict[str, tuple[str, dict[str, int]]] = {
    "resnet50": ("resnet50", {}),
    "bert_base": ("bert_base", {}),
    "bert_base 24x1024": ("bert_base", {"hidden": 1024, "layers": 24, "heads": 16, "ffn": 4096}),
    "gpt": ("gpt", {}),
    "gpt 24x1024": ("gpt", {"hidden": 1024, "layers": 24, "heads": 16}),
    "gpt 24x2048": ("gpt", {"hidden": 2048, "layers": 24, "heads": 16}),
}
"""Of ``blind.py``."""


class Registered(nn.Module):
    """A model of fleetbench's registry with its loss."""

    def __init__(self, name: str, options: dict[str, int]) -> None:
        super().__init__()
        self.model, self.compare = MODELS[name](**options), loss_of(name)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.compare(self.model(batch), torch.zeros(len(batch), dtype=torch.int64))


def build(row: dict[str, str]) -> tuple[nn.Module, torch.Tensor]:
    """The model of a row of ``data.csv``, and a batch."""
    batch, length = int(row["batch"]), int(row["length"])
    if row["variant"] == "registry":
        inputs = torch.zeros(batch, length, dtype=torch.int64) if length else torch.randn(batch, 3, 224, 224)
        return Registered(*REGISTRY[row["model"]]), inputs
    if row["model"] == "resnet50":
        images = torch.randn(batch, 3, 224, 224)
        model: nn.Module = Classified()
        if row["variant"] == "nhwc":
            images = images.to(memory_format=torch.channels_last)  # convolutions hand the layout on
        return model, images
    hidden, layers, heads, vocab = SIZES[row["model"]]
    masked = {"squad": 0, "phase1": 20, "phase2": 80}.get(row["variant"], -1)
    fused, dropout = row["variant"] == "fused", 0.1 if masked >= 0 or row["variant"] == "megatron" else 0.0
    model = Transformer(vocab, hidden, layers, heads, length, masked, fused=fused, dropout=dropout)
    return model, torch.randint(0, vocab, (batch, length))
