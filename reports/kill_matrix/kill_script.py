"""A user's script that says how far it has come, by empty files: ``kill_script.py FOLDER STEPS [served]``.

``MOMENT.NAME`` appears in FOLDER as NAME (``0``, ``1``, ``server0``) comes to ``start`` (before torch is imported), ``middle``,
``save`` (a file of a checkpoint is written, and not on the disk yet), ``load`` (a file of one is about to be read) and ``end``
(the training is over, the process is not).
Where FOLDER holds ``again``, it only loads the checkpoint that is there, if any, says so, and ends.
The environment variable ``KILL_SCRIPT_START_S`` is how many seconds a process stays at ``start``; none without it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

folder, steps, served = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["served"]
is_server = os.environ.get("TRAINING_ROLE") == "PSERVER"
name = "server0" if is_server else os.environ.get("RANK") or os.environ["PADDLE_TRAINER_ID"]


def reach(moment: str, stay_s: float = 0.0) -> None:
    """Say that this process is there, and stay."""
    path = folder / f"{moment}.{name}"
    if not path.exists():
        path.touch()
        time.sleep(stay_s)


reach("start", float(os.environ.get("KILL_SCRIPT_START_S", "0")))

import torch  # noqa: E402  # takes seconds in which a process may be struck

from fleetbench import DistributedStrategy, fleet  # noqa: E402

fsync = os.fsync


def slow_fsync(handle: int) -> None:
    """Give who watches the time to strike within the save."""
    reach("save", 1.0)
    fsync(handle)


load = torch.load


def slow_load(*arguments: Any, **named: Any) -> Any:
    """Give who watches the time to strike within the load."""
    reach("load", 1.0)
    return load(*arguments, **named)


strategy = DistributedStrategy.from_dict({"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 0}} if served else {})
fleet.init(strategy, timeout_s=10.0)
model = fleet.distributed_model(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
if is_server:
    os.fsync = slow_fsync
    fleet.init_server()
    fleet.run_server()
    reach("end", 1.0)
    sys.exit()
if served:
    fleet.init_worker()
if (folder / "again").exists():
    if (folder / "checkpoint").exists():
        fleet.load_persistables(folder / "checkpoint")
    print(f"rank {name} went on")
    sys.exit()
is_plain = not served and "FLEETBENCH_TUNING" not in os.environ
for step in range(1, steps + 1):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if step == 10:
        reach("middle")
    if step == 50 and served:
        fleet.save_persistables(folder / "checkpoint")
    if step == 20 and is_plain:
        fleet.save_persistables(folder / "checkpoint")  # it stays in force while the next is written
    if step == 50 and is_plain:
        os.fsync = slow_fsync
        fleet.save_persistables(folder / "checkpoint")
        os.fsync = fsync
        torch.load = slow_load
        fleet.load_persistables(folder / "checkpoint")
        torch.load = load
if served:
    fleet.stop_worker()
reach("end", 1.0)
