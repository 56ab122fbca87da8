"""Queues: how many collectives a communicator carries at once.

A communicator is a first-in-first-out queue: its operations begin in one order on all ranks, and as
many may be under way as the backend carries. NCCL carries one, because a communicator's operations
follow each other on a stream. gloo carries two: a process group has two threads for each network
device (``ProcessGroupGloo``'s ``options->threads``), and takes one device. That is what
DistributedDataParallel has in flight on one group.
"""

from __future__ import annotations

_DEPTHS = {"gloo": 2}


def queue_depth(backend: str) -> int:
    """Operations that one communicator of ``backend`` carries at once, where none comes after another."""
    return _DEPTHS.get(backend, 1)
