"""``plain_loops.Plain`` with fleet's four lines: ``four_line_loops.py RANK RANKS STORE OUTPUT STRATEGY``."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist
from plain_loops import Early, Plain

from fleetbench import DistributedStrategy, fleet


class FourLines(Plain):
    """Begins as the plain one does: with parameters of rank 0."""

    def wrap(self) -> None:
        """See ``Plain``."""
        self.ddp = fleet.distributed_model(self.model)  # type: ignore[assignment]  # called as one
        self.optimizer = fleet.distributed_optimizer(torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9))  # type: ignore[assignment]  # an SGD


rank, ranks, store, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
fleet.init(DistributedStrategy.load(sys.argv[5]))
np.savez(output, **{name: np.array(FourLines(rank).run()) for name in (Plain.__name__, Early.__name__)})
dist.barrier()
