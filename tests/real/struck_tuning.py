"""A user's script in a tuning in which somebody is killed, once at each of some places. ``struck_tuning.py VICTIM OUT MARKS``.

VICTIM is ``worker`` (trainer 1 itself), ``agent`` (what started it), ``driver`` (of the tuning) or ``nobody``; OUT is where the tuning
keeps its legs, which say how far it has come: no two strikes fall upon one leg. A file in MARKS says where somebody was struck.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

DUE = {"start": -1, "averaging": -1, "save": 0, "bucket": 1, "change": 2}
"""Legs that must be on disk by then; -1 is before the profile is complete."""
rank, tuning = int(os.environ["RANK"]), Path(os.environ["FLEETBENCH_TUNING"])
victim, out, marks = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])


def kept() -> int:
    """Legs that the tuning has on disk."""
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob("resume-*/evidence.json")]
    return len(kept[0].get("outcomes", ())) if kept else -1


def strike(place: str) -> None:
    """Kill the victim if it is due here, and note it before."""
    if rank != 1 or victim == "nobody" or (marks / place).exists() or kept() < DUE[place]:
        return
    driver = json.loads((tuning / "driver.json").read_text(encoding="utf-8"))["pid"]
    (marks / place).touch()
    os.kill({"worker": os.getpid(), "agent": os.getppid(), "driver": driver}[victim], signal.SIGKILL)
    time.sleep(60.0)  # the leg does not come to its end before that is noticed


strike("start")

import torch  # noqa: E402  # takes seconds, and a worker may die before
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from fleetbench import fleet  # noqa: E402
from real.communication.communicators import Communicators  # noqa: E402
from real.job.rank_legs import EngineSwitch  # noqa: E402

WIDTH, SAVE_EVERY = 400, 7
all_reduce, broadcast, change = dist.all_reduce, Communicators.broadcast, EngineSwitch.open


def struck_reduce(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    """An all-reduce; strikes while a bucket's, or that of an averaging, is under way."""
    work = all_reduce(tensor, *arguments, **named)
    engines = [] if fleet._job is None else fleet._job.models.engines
    if work is not None and not work.is_completed() and engines:
        strike("averaging" if engines[0].strategy.is_local else "bucket")
    return work


def struck_change(site: EngineSwitch, *arguments: Any, **named: Any) -> Any:
    """A change of legs; strikes in the middle of what all ranks get from rank 0."""
    count = 0

    def struck_broadcast(communicators: Communicators, *arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            strike("change")
        return broadcast(communicators, *arguments, **named)

    Communicators.broadcast = struck_broadcast  # type: ignore[method-assign]  # for this change alone
    try:
        return change(site, *arguments, **named)
    finally:
        Communicators.broadcast = broadcast  # type: ignore[method-assign]  # as it was


def save(model: nn.Module) -> None:
    """What a script saves by its own means; strikes after half of the file."""
    data = io.BytesIO()
    torch.save(model.state_dict(), data)
    content = data.getvalue()
    with (marks / f"model{rank}.pt").open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        strike("save")
        file.write(content[len(content) // 2 :])


dist.all_reduce, EngineSwitch.open = struck_reduce, struck_change  # type: ignore[method-assign]  # from here on
fleet.init(timeout_s=30.0)
model = fleet.distributed_model(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5))
for step in range(1, 100_000):
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % SAVE_EVERY == 0:
        save(model)
