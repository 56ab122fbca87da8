"""Sparse gradients: which parameters have them, as far as a model tells beforehand."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from fleetbench.errors import ConfigError


def sparse_weights(model: nn.Module) -> frozenset[str]:
    """Names of the parameters whose gradients are sparse: embeddings' that were built so."""
    modules = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in modules)


def refuse_unknown_sparse(name: str, gradient: torch.Tensor | None, sparse: Collection[str]) -> None:
    """Raise ``ConfigError`` for a gradient that is sparse and was planned as dense, or the other way round."""
    if gradient is not None and not gradient.is_sparse and name in sparse:
        raise ConfigError(
            "has a dense gradient, though its embedding is sparse",
            f"parameter {name}",
            hint="a weight that a dense layer shares needs sparse=False",
        )
    if gradient is not None and gradient.is_sparse and name not in sparse:
        raise ConfigError(
            "has a sparse gradient, and is no embedding's weight", f"parameter {name}", hint="use torch.nn.Embedding(sparse=True)"
        )
