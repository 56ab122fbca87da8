"""Clock offsets: by how much the ranks' wall clocks differ, and how sure that is.

Rank 0 asks, a rank answers with its clock; the answer was written somewhere between question and
answer, so of many exchanges the fastest says most: the offset is the answer minus the middle of the
exchange, wrong by at most half of its duration (Cristian, "Probabilistic clock synchronization", 1989).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_EXCHANGES = 40


@dataclass(frozen=True, slots=True)
class Offset:
    """A rank's clock minus rank 0's, and by how much at most that is wrong."""

    offset_ns: int
    error_ns: int


def measure_offsets(group: dist.ProcessGroup | None = None) -> list[Offset]:
    """Every rank's offset, on rank 0; empty elsewhere. All ranks call it; ``group`` is one of gloo. Takes milliseconds a rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank != 0:
        _answer(group)
        return []
    return [Offset(0, 0), *(_ask(other, group) for other in range(1, ranks))]


def fastest(exchanges: list[tuple[int, int, int]]) -> Offset:
    """The offset that exchanges ``(asked, answered, heard)`` give, in nanoseconds; ``answered`` is on the other's clock."""
    asked, answered, heard = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return Offset(answered - (asked + heard) // 2, (heard - asked + 1) // 2)


def _ask(other: int, group: dist.ProcessGroup | None) -> Offset:
    message = torch.zeros(1, dtype=torch.int64)
    exchanges = []
    for _ in range(_EXCHANGES):
        asked = time.time_ns()
        dist.send(message, other, group=group)
        dist.recv(message, other, group=group)
        exchanges.append((asked, int(message), time.time_ns()))
    return fastest(exchanges)


def _answer(group: dist.ProcessGroup | None) -> None:
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(_EXCHANGES):
        dist.recv(message, 0, group=group)
        message[0] = time.time_ns()
        dist.send(message, 0, group=group)
