"""Reader: what gives a rank its batches, and the shape that images have in one."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol, runtime_checkable

import torch

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels in 0..1: red, green, blue; as every published ImageNet model takes them."""


class Reader(Protocol):
    """Batches of one rank by their position, counted from 0 over all epochs.

    Reading in the order of positions is fast; any other position may be asked for at any time.
    ``close`` ends what the reader started; a second ``close`` does nothing.
    """

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(batch, ...)`` and labels ``(batch,)``, int64. Raises ``ConfigError`` naming a sample that cannot be read."""
        ...

    def close(self) -> None:
        """End the reader's processes, if it has any."""
        ...


class BatchTime(NamedTuple):
    """What one batch took that processes make ahead."""

    load_ns: int
    """To make it, in its process."""
    waited_ns: int
    """Until it was there, from when it was asked for."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A ``Reader`` whose batches are made by ``loaders`` processes; 0: in this one."""

    loaders: int
    times: deque[BatchTime]
    """Of the latest batches, in their order."""


def normalise(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pixels ``(batch, 3, H, W)`` of 0..255 to numbers of mean 0 and deviation 1 over ImageNet."""
    mean, std = (torch.tensor(values, dtype=dtype, device=pixels.device).view(3, 1, 1) for values in (MEAN, STD))
    return pixels.to(dtype).div_(255).sub_(mean).div_(std)
