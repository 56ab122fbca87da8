"""One rank that exchanges with a trainer like itself: what two do on one device, where NCCL takes one rank alone."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist

from fleetbench.plan.groups import Parts
from real.communication.communicators import Communicators, Way


class Mirror(Communicators):
    """The collectives of two trainers, on groups of this rank alone: a mean with an equal is one's own."""

    @property
    def trainers(self) -> int:
        """Itself, and its image."""
        return 2

    def _make(self, parts: Parts, name: str) -> dist.ProcessGroup | None:
        assert parts
        return super()._make(((0,),), name)

    def _ways(self, communicator: int) -> list[Way]:
        return [dataclasses.replace(way, ranks=1) for way in super()._ways(communicator)]
