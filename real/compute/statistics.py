"""Batch-norm statistics that stay where they are while forwards move copies of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def hold_statistics(model: nn.Module) -> Callable[[], None]:
    """Let batch norms move copies of their statistics; returns what gives them their own back.

    Taking the statistics away, or a momentum of 0, would not do: the forward would save other
    tensors, or turn an infinite statistic into NaN.
    """
    norms = [item for item in model.modules() if isinstance(item, _NormBase) and item.training]
    buffers = [dict(norm._buffers) for norm in norms]  # noqa: SLF001  # assigning a buffer would clone for good
    for norm in norms:
        norm._buffers.update({name: None if item is None else item.clone() for name, item in norm._buffers.items()})  # noqa: SLF001  # as above

    def release() -> None:
        for norm, own in zip(norms, buffers, strict=True):
            norm._buffers.update(own)  # noqa: SLF001  # as above

    return release
