"""One rank that exchanges with a trainer like itself: what two do on one device, where NCCL takes one rank alone."""

from __future__ import annotations

import torch.distributed as dist

from fleetbench.plan.groups import Parts
from real.communication.communicators import Communicators


class Mirror(Communicators):
    """The collectives of two trainers, on groups of this rank alone: a mean with an equal is one's own."""

    @property
    def trainers(self) -> int:
        """Itself, and its image."""
        return 2

    def _make(self, parts: Parts, name: str, backend: str) -> dist.ProcessGroup | None:
        assert parts
        return super()._make(((0,),), name, backend)

    def prove(self, together: int, *, beside: bool = False) -> None:
        """Sum nothing: the image brings no numbers of its own."""
