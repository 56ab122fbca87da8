"""Communicators: the process groups that carry a plan's operations, one lane each.

Communicators are made in one order on every rank and kept for the life of the process, because
making one is itself a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from real.lanes import Lane, ThreadLane


class CollectiveFailed(RuntimeError):  # noqa: N818  # named like the other ends of a worker
    """A collective broke, which is most often another rank's fault."""


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveFailed(str(error)) from error


class Communicators:
    """Process groups over all ranks, numbered from 0, made on first use."""

    def __init__(self, backend: str, timeout: timedelta) -> None:
        self._backend = backend
        self._timeout = timeout
        self._groups: list[dist.ProcessGroup] = []
        self._lanes: list[Lane] = []

    @property
    def trainers(self) -> int:
        """Ranks of every communicator."""
        return dist.get_world_size()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return dist.get_rank()

    def require(self, number: int) -> None:
        """Make communicators up to ``number`` of them; every rank calls this at the same place."""
        while len(self._groups) < number:
            name = f"communicator-{len(self._groups)}"
            self._groups.append(dist.new_group(backend=self._backend, timeout=self._timeout, group_desc=name))
            self._lanes.append(ThreadLane(name))

    def lane(self, communicator: int) -> Lane:
        """The lane of a communicator."""
        return self._lanes[communicator]

    def average(self, tensor: torch.Tensor, communicator: int) -> None:
        """Replace ``tensor`` by its mean over all ranks, bit-identical on each; blocks on gloo."""
        with _collective():
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self._groups[communicator])

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by rank 0's."""
        self.require(1)
        with _collective():
            dist.broadcast(tensor, src=0, group=self._groups[0])

    def barrier(self) -> None:
        """Meet all ranks."""
        self.require(1)
        with _collective():
            dist.barrier(group=self._groups[0])

    def close(self) -> None:
        """Release the lanes; the process groups go with the process."""
        for lane in self._lanes:
            lane.close()
