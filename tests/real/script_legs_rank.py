"""One rank of a script in a tuning: synchronous, Local SGD, synchronous again.

``script_legs_rank.py RANK RANKS STORE OUTPUT TUNING``.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist
import training_problem as problem
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet
from fleetbench.config import encode
from real.job.folder import DriverSide
from real.leg import Leg
from real.processes.roles import TUNING

LOCAL = DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 3}, fuse_grad_size_in_MB=0.001)  # type: ignore[arg-type]  # tables are decoded
ORDERS = (
    Leg(steps=4, warmup_steps=0, start="as_is"),
    Leg(strategy=LOCAL, steps=8, warmup_steps=0),
    Leg(strategy=DistributedStrategy(fuse_all_reduce_ops=False), steps=4, warmup_steps=1),
)
"""17 steps: 4 in step, 8 in rounds of 3, 5 in step."""
LAST = 20
"""The script itself would train on."""


def order_all(tuning: Path) -> None:
    """What the driver would write, all of it beforehand."""
    driver = DriverSide(tuning)
    driver.make()
    for number, order in enumerate(ORDERS):
        driver.order(number, order)
    driver.stop()


def main() -> None:
    """Train until the legs are done; save the parameters after every step."""
    rank, ranks, store, output, tuning = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    os.environ[TUNING] = tuning
    fleet.init()
    model = fleet.distributed_model(problem.model("float64"))
    optimizer = fleet.distributed_optimizer(problem.optimizer_of("momentum")(model))
    history, gradients = [], []
    try:
        for step in range(1, LAST + 1):
            inputs, labels = problem.own_batch(step, int(rank), int(ranks), "float64")
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            fleet.report(loss=loss)
            try:
                optimizer.step()
            finally:
                history.append(problem.flat(model).numpy())
                gradients.append(all(parameter.grad is not None for parameter in model.parameters()))
            optimizer.zero_grad()
    finally:
        fleet.synchronize()
        fleet.barrier_worker()
        np.savez(output, history=np.stack(history), gradients=np.array(gradients))
        print(json.dumps(encode(ORDERS[0])))


if __name__ == "__main__":
    main()
