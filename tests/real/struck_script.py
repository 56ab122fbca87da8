"""A user's script in which workers are killed. ``struck_script.py MARK FAULTS TIMEOUT_S``; faults as ``faults.encode`` writes them.

It trains synchronously, and then with Local SGD, on several buckets. A struck worker kills itself
once it has started the second all-reduce of the step, to which the others come late: it is under way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import faults

rank = int(os.environ["RANK"])
mark, everybodys, timeout_s = Path(sys.argv[1]), faults.decode(sys.argv[2]), float(sys.argv[3])
planned = [fault for fault in everybodys if fault.rank == rank]


def strike(place: str, step: int, *, in_flight: bool) -> None:
    """Note what happens, and die of it."""
    noted = {"rank": rank, "place": place, "step": step, "in_flight": in_flight, "time_s": time.time()}
    mark.write_text(json.dumps(noted), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


if any(fault.place == "start" for fault in planned):
    strike("start", 0, in_flight=False)

import torch  # noqa: E402  # takes seconds, and a worker may die before
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from fleetbench import DistributedStrategy  # noqa: E402
from real.fleet import Fleet  # noqa: E402

STEPS = 6
WIDTH = 600
LATE_S = 0.3
all_reduce = dist.all_reduce


def train(place: str, **fields: Any) -> None:
    """Some steps of two roles, one after the other, as two scripts would do."""
    fleet = Fleet()
    fleet.init(DistributedStrategy(fuse_all_reduce_ops=False, **fields), timeout_s=timeout_s)
    model = fleet.distributed_model(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    for step in range(1, STEPS + 1):
        started = 0

        def observed(tensor: torch.Tensor, *arguments: Any, step: int = step, **named: Any) -> Any:
            nonlocal started
            started += 1
            struck = {fault.rank for fault in everybodys if (fault.place, fault.step) == (place, step)} if started == 2 else set()
            if struck and rank not in struck:
                time.sleep(LATE_S)
            work = all_reduce(tensor, *arguments, **named)
            if rank in struck:
                strike(place, step, in_flight=work is not None and not work.is_completed())
            return work

        dist.all_reduce = observed
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce = all_reduce


train("bucket")
train("averaging", localsgd=True, localsgd_configs={"k_steps": 2})
