"""Count what torch.distributed is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def counted() -> Iterator[list[int]]:
    """Sizes of the all-reduces that torch is asked for inside."""
    sizes: list[int] = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *arguments, **named)

    dist.all_reduce = counting
    try:
        yield sizes
    finally:
        dist.all_reduce = original
