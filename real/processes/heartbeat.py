"""Heartbeats: which step every rank is at, in a file that workers and driver map."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_FIELDS = 4  # process id, leg, step, time


@dataclass(frozen=True, slots=True)
class Beat:
    """The last sign of life of a rank; ``pid`` is 0 before the first."""

    pid: int
    leg: int
    step: int
    time_ns: int


class Heartbeats:
    """One row a rank; a rank writes its own, the driver reads all."""

    def __init__(self, path: Path, trainers: int, *, create: bool = False) -> None:
        self._rows = np.memmap(path, dtype=np.int64, mode="w+" if create else "r+", shape=(trainers, _FIELDS))

    def beat(self, rank: int, leg: int, step: int) -> None:
        """Say that ``rank`` has begun ``step`` of ``leg``."""
        self._rows[rank] = (os.getpid(), leg, step, time.monotonic_ns())

    def read(self) -> list[Beat]:
        """The last sign of life of every rank."""
        return [Beat(*(int(value) for value in row)) for row in np.array(self._rows)]
