"""A script of two ranks in one process that speaks the files of a tuning directory, and trains nothing.

``fake_script.py NOTES [BEHAVIOUR...]``: a line a launch goes to NOTES, with the legs that it was ordered. A behaviour is
``LAUNCH:LEG:WHAT``: in that leg of that launch (from 0; ``*`` is any) it does what it is told: ``killed``, ``raises``,
``memory``, ``config``, ``nan`` (on both ranks, on rank 1 first), ``hangs``, ``code=N``, or ``total=N``: from the launch's beginning on
it has so many steps and no more.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

STEP_NS = {32.0: 4_000_000, 1.0: 3_000_000}
"""What a step takes, by the size of its buckets."""
FACTS = {
    "trainers": 2,
    "trainers_per_node": 2,
    "backend": "gloo",
    "device": "cpu",
    "strategy": {},
    "optimizer": "SGD",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "dtype": "float32",
    "batch_size": 8,
    "reports_loss": True,
}

tuning = Path(os.environ["FLEETBENCH_TUNING"])
notes = Path(sys.argv[1])
launch = len(notes.read_text().splitlines()) if notes.exists() else 0
behaviours = [entry.split(":") for entry in sys.argv[2:]]


def told(leg: str) -> list[str]:
    """What to do in a leg of this launch."""
    return [what for where, number, what in behaviours if where in ("*", str(launch)) and number in ("*", leg)]


def write(path: Path, data: Any) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(data))
    draft.replace(path)


def beat(leg: int, step: int) -> None:
    """Show both ranks' life."""
    for rank in range(2):
        (tuning / "beats" / f"rank{rank}").write_bytes(struct.pack("<4q", os.getpid(), leg, step, time.monotonic_ns()))


def error(message: str, *, collective: bool = False, config: list[str | None] | None = None) -> dict[str, Any]:
    """What a rank says before it ends."""
    return {"message": message, "collective": collective, "time_ns": time.monotonic_ns(), "config": config}


def part(rank: int, leg: dict[str, Any], steps: int) -> dict[str, Any]:
    """A rank's results: every step takes what its bucket size says, and reports a loss of 1 / step."""
    length = STEP_NS.get(leg["strategy"].get("fuse_grad_size_in_MB", 32.0), 5_000_000)
    records = [
        {
            "record": {
                "rank": rank,
                "step": step,
                "start_ns": step * length,
                "forward_ns": length // 4,
                "backward_ns": length // 4,
                "stall_ns": length // 4,
                "update_ns": length // 8,
                "end_ns": (step + 1) * length,
                "arrival_ns": step * length + length // 2,
                "local_steps": 1,
                "loss": 1.0 / max(1, step),
                "bytes_sent": 100,
            },
            "paused_ns": 0,
        }
        for step in range(1 - leg["warmup_steps"], 1 - leg["warmup_steps"] + steps)
    ]
    plan = json.loads(os.environ["FAKE_PLAN"])
    complete = steps == leg["steps"] + leg["warmup_steps"]
    found = {"steps": records, "spans": [], "complete": complete, "num_steps": steps, "plan": plan, "recordings": []}
    return found | {"evaluated": [], "peak_bytes": 1000 + rank, "not_finite": None, "facts": FACTS, "layer_times": {"rank": rank}}


with notes.open("a") as file:
    file.write(f"legs{' seed' + os.environ['FLEETBENCH_SEED'] if 'FLEETBENCH_SEED' in os.environ else ''}")
for rank in range(2):
    write(tuning / "ranks" / f"rank{rank}.json", {"trainers": 2, "host": f"host{rank}"})
beat(-1, 0)
left = min((int(what.removeprefix("total=")) for what in told("*") if what.startswith("total=")), default=10**6)
number = done = 0
while True:
    while not (tuning / "legs" / f"{number}.json").exists():
        if (tuning / "legs" / "stop").exists() or (tuning / "abort").exists():
            with notes.open("a") as file:
                file.write(" stop\n")
            sys.exit(max((int(what.removeprefix("code=")) for what in told("stop")), default=0))
        time.sleep(0.005)
    leg = json.loads((tuning / "legs" / f"{number}.json").read_text())
    kind = "profile" if leg["profile"] else "record" if leg["start"] == "as_is" else "leg"
    with notes.open("a") as file:
        file.write(f" {kind}{leg['steps'] + leg['warmup_steps']}")
    beat(number, done + 1)
    now = told(str(number))
    if set(now) & {"killed", "raises", "memory", "config", "hangs"} or any(what.startswith("code=") for what in now):
        with notes.open("a") as file:
            file.write(f" {now[0]}\n")
    if "killed" in now:
        os.kill(os.getpid(), signal.SIGKILL)
    for what, message, config in (
        ("raises", "ValueError: the third layer is odd", None),
        ("memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", None),
        ("config", "ConfigError: x", ["is refused here", "strategy.amp", "true", "leave it"]),
    ):
        if what in now:
            write(tuning / "errors" / "rank0.json", error("RuntimeError: Connection closed by peer", collective=True))
            write(tuning / "errors" / "rank1.json", error(message, config=config))
            sys.exit(1)
    if "hangs" in now:
        beat(number, done + 5)
        time.sleep(60)
    for what in now:
        if what.startswith("code="):
            sys.exit(int(what.removeprefix("code=")))
    steps = min(left, leg["steps"] + leg["warmup_steps"])
    left -= steps
    done += steps
    for rank in range(2):
        found = part(rank, leg, steps)
        broken = {"not_finite": {"what": "the loss was nan", "step": 6 - rank}} if "nan" in now else {}
        write(tuning / "results" / str(number) / f"rank{rank}.json", found | broken)
    if left == 0 and steps < leg["steps"] + leg["warmup_steps"]:
        with notes.open("a") as file:
            file.write(" end\n")
        sys.exit(0)
    number += 1
