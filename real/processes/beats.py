"""Beats: which step every rank is at, one small file a rank, which also a shared file system carries.

A rank overwrites its file as a step begins. A reader trusts no clock but its own: what counts is when
it saw a beat change.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<4q")  # process id, leg, step, time


@dataclass(frozen=True, slots=True)
class Beat:
    """The last sign of life of a rank; ``pid`` is 0 before the first."""

    pid: int
    leg: int
    step: int
    time_ns: int


NEVER = Beat(0, -1, 0, 0)


class BeatWriter:
    """Writes one rank's beats."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"rank{rank}", os.O_CREAT | os.O_WRONLY, 0o644)

    def beat(self, leg: int, step: int) -> None:
        """``step`` begins, of ``leg``."""
        os.pwrite(self._file, _LAYOUT.pack(os.getpid(), leg, step, time.monotonic_ns()), 0)


class BeatReader:
    """Reads all ranks' beats; ``time_ns`` of what it returns is when this reader first saw that beat."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[int, tuple[bytes, int]] = {}

    def read(self, trainers: int) -> list[Beat]:
        """The last beat of every rank, or ``NEVER``."""
        return [self._of(rank) for rank in range(trainers)]

    def _of(self, rank: int) -> Beat:
        try:
            data = (self._folder / f"rank{rank}").read_bytes()
        except OSError:
            return NEVER
        if len(data) < _LAYOUT.size:
            return NEVER
        known = self._seen.get(rank)
        if known is None or known[0] != data:
            known = self._seen[rank] = (data, time.monotonic_ns())
        pid, leg, step, _ = _LAYOUT.unpack(data[: _LAYOUT.size])
        return Beat(pid, leg, step, known[1])
