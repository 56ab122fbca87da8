"""A script with fleet's four lines that breaks on rank 1, three steps after a strategy begins whose buckets' size says how."""

from __future__ import annotations

import os
import signal
import time

import torch

from fleetbench import fleet

fleet.init(timeout_s=6.0)
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
seen, since = 32.0, 0
while True:
    how = fleet._job.models.engines[0].strategy.fuse_grad_size_in_MB
    since = since + 1 if how == seen else 0
    seen = how
    loss = model(torch.ones(2, 4)).square().mean()
    if fleet.worker_index() == 1 and since == 3:
        if how == 1.0:
            raise ValueError("the third layer is odd")
        if how == 2.0:
            loss = loss * float("nan")
        if how == 3.0:
            torch.empty(2**60)
        if how == 4.0:
            time.sleep(600)
        if how == 5.0:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == 6.0:
            fleet.report(loss=loss * float("inf"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
