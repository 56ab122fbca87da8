"""HostClocks: by how much another host's monotonic clock is ahead of rank 0's.

All ranks leave a barrier at about one time, and note it; the median over some barriers is the
offset, good to what ranks differ by in leaving one. Ranks that share a kernel share its clock, and
nothing is measured.
"""

from __future__ import annotations

import time
import zlib
from statistics import median

import torch

from real.communication.communicators import Communicators

_BARRIERS = 9


class HostClocks:
    """Offsets among the ranks of one launch. Every rank makes it, and asks it, at the same place."""

    def __init__(self, communicators: Communicators, kernel: str) -> None:
        """``kernel`` is equal where clocks are shared."""
        self._communicators = communicators
        kernels = self._of_all(zlib.crc32(kernel.encode()))
        self._is_near = kernels[communicators.rank] == kernels[0]
        self._several = len(set(kernels)) > 1

    def offset_ns(self) -> int:
        """What to take from this rank's times to have them on rank 0's clock."""
        if not self._several:
            return 0
        found = []
        for _ in range(_BARRIERS):
            self._communicators.barrier()
            now = self._of_all(time.monotonic_ns())
            found.append(now[self._communicators.rank] - now[0])
        return 0 if self._is_near else round(median(found))

    def _of_all(self, value: int) -> list[int]:
        """Every rank's value, by rank."""
        communicators = self._communicators
        values = torch.zeros(communicators.trainers, dtype=torch.int64, device=communicators.device)
        values[communicators.rank] = value
        if communicators.trainers > 1:
            communicators.require(1)
            communicators.all_reduce(values, "sum")
        return [int(value) for value in values.tolist()]
