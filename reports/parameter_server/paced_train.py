"""One process of the queueing part of testbed.py: a trainer whose steps take declared times, or a server.

``python paced_train.py OUT NUMBERS CLOSED``: a model of so many dense numbers; CLOSED is 1 where a trainer waits for
its own push and pull behind every step. OUT/thinks.json holds the nanoseconds of every step, by rank. What a
step computes is hidden in them: the trainer sleeps only for what is left, as on a device that computes by itself.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from fleetbench import DistributedStrategy, fleet
from real.emulated.pace import Pace, sharpen_sleep


def main(out: Path, numbers: int, closed: bool) -> None:
    """Train, or serve, and write what was seen."""
    torch.set_num_threads(1)
    fleet.init(DistributedStrategy.from_dict({"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 0}}))
    model = fleet.distributed_model(torch.nn.Linear(numbers, 1, bias=False))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    if fleet.is_server():
        fleet.init_server()
        report = fleet.run_server()
        found = {"staleness": sorted(report.staleness.items()), "busy_s": report.busy_ns / 1e9, "updates": report.staleness.total()}
        (out / f"server{fleet.server_index()}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    sharpen_sleep()
    fleet.init_worker()
    rank = fleet.worker_index()
    thinks_ns = json.loads((out / "thinks.json").read_text(encoding="utf-8"))[rank]
    ones = torch.ones(1, numbers)
    pace = Pace()
    fleet.barrier_worker()
    ends_s, late_s = [time.monotonic()], []
    for think_ns in thinks_ns:
        deadline_ns = pace.deadline(think_ns)
        loss = model(ones).sum()
        optimizer.zero_grad()
        loss.backward()
        late_s.append(pace.sleep_until(deadline_ns) * 1e-9)
        optimizer.step()
        if closed:
            fleet.synchronize()
        ends_s.append(time.monotonic())
    (out / f"trainer{rank}.json").write_text(json.dumps({"ends_s": ends_s, "late_s": late_s}), encoding="utf-8")
    fleet.stop_worker()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
