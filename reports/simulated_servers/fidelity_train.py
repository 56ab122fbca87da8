"""One process of a fidelity run: a trainer that sleeps for declared times between forward and backward, or a server.

python fidelity_train.py OUT STEPS CLOSED: CLOSED is 1 where a trainer waits for its own push and
pull behind every step. OUT/thinks.json holds the nanoseconds that it sleeps, by rank and step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from fleetbench import DistributedStrategy, fleet

NUMBERS = 10_000


def main(out: Path, steps: int, closed: bool) -> None:
    """Train, or serve, and write what was seen."""
    torch.set_num_threads(1)
    fleet.init(DistributedStrategy.from_dict({"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 0}}))
    model = fleet.distributed_model(torch.nn.Linear(NUMBERS, 1, bias=False))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    if fleet.is_server():
        fleet.init_server()
        report = fleet.run_server()
        found = {"staleness": sorted(report.staleness.items()), "busy_s": report.busy_s, "updates": report.updates}
        (out / f"server{fleet.server_index()}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    fleet.init_worker()
    rank = fleet.worker_index()
    thinks_ns = json.loads((out / "thinks.json").read_text(encoding="utf-8"))[rank]
    ones = torch.ones(1, NUMBERS)
    fleet.barrier_worker()
    ends_s = [time.monotonic()]
    slept_s = []
    for think_ns in thinks_ns[:steps]:
        loss = model(ones).sum()
        begin_s = time.monotonic()
        time.sleep(think_ns * 1e-9)
        slept_s.append(time.monotonic() - begin_s)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if closed:
            fleet.synchronize()
        ends_s.append(time.monotonic())
    (out / f"trainer{rank}.json").write_text(json.dumps({"ends_s": ends_s, "slept_s": slept_s}), encoding="utf-8")
    fleet.stop_worker()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
