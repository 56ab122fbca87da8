"""Run many launches and many simulations in one process, and note what it holds: memory, threads, descriptors, processes, files.

python reports/long_runs/watch.py launches --number 200 >> reports/long_runs/raw.jsonl
python reports/long_runs/watch.py points --number 2000 >> reports/long_runs/raw.jsonl
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fleetbench import Experiment, measure, sweep
from fleetbench.store import versions

DECLARED = Path(__file__).parents[2] / "examples" / "sixty_four_gpus.toml"
EVERY = 20
"""Launches between two looks."""


def held(begin: float, done: int, folder: Path) -> dict[str, Any]:
    """What this process, its children and its folder for temporary files hold now."""
    gc.collect()
    process = psutil.Process()
    return {
        "done": done,
        "seconds": round(time.time() - begin, 1),
        "rss_mb": round(process.memory_info().rss / 1e6, 1),
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "children": len(process.children(recursive=True)),
        "temporary_files": sum(1 for _ in folder.rglob("*")),
        "shared_memory_files": sum(1 for _ in Path("/dev/shm").iterdir()),  # noqa: S108  # only counted
    }


def launches(number: int, look: Callable[[int], None]) -> None:
    """Real runs of 20 steps on two processes, each a launch of its own."""
    experiment = Experiment.load(None, ["workload.steps=20", "run.warmup_steps=2", "cluster.stragglers=[]"])
    for done in range(number):
        if done % EVERY == 0:
            look(done)
        measure(experiment)
    look(number)


def points(number: int, look: Callable[[int], None]) -> None:
    """Ten sweeps of 64 trainers over the bandwidth between nodes, simulated in this process."""
    length = number // 10
    axis = "cluster.inter.bandwidth=" + ",".join(f"{1 + step / 10:g} Gbit/s" for step in range(length))
    for done in range(0, number, length):
        look(done)
        sweep(lambda overrides: Experiment.load(DECLARED, list(overrides)), [axis], processes=1)
    look(number)


def main() -> None:
    """One JSON object a look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["launches", "points"])
    parser.add_argument("--number", type=int, required=True)
    arguments = parser.parse_args()
    begin, folder = time.time(), Path(tempfile.gettempdir())

    def look(done: int) -> None:
        print(json.dumps({"what": arguments.what, **held(begin, done, folder)}), flush=True)

    print(json.dumps({"what": arguments.what, "versions": versions()}), flush=True)
    (launches if arguments.what == "launches" else points)(arguments.number, look)


if __name__ == "__main__":
    main()
