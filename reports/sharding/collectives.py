"""gloo's collectives among four hosts at 100 Mbit/s: what an all-gather, a reduce-scatter and an all-reduce take.

``python reports/sharding/collectives.py`` from the repository's root, on a quiet machine, writes ``collectives.csv``: seconds of the
fastest of four, of which a barrier's are taken off.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from fleetbench.experiment import Experiment
from real.testbed.testbed import testbed_of

OUT = Path(__file__).with_suffix(".csv")
HOSTS, SIZES, PORT = 4, (65_536, 200_000, 262_144, 800_000, 1_048_576, 1_600_000, 4_194_304), "29777"


def rank() -> None:
    """One rank; the first writes the table."""
    dist.init_process_group("gloo")
    rows = []
    for nbytes in SIZES:
        whole, part = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // HOSTS)
        calls: dict[str, Callable[[], object]] = {
            "barrier": lambda: None,
            "all_gather": lambda part=part, whole=whole: dist.all_gather_single(whole, part),
            "reduce_scatter": lambda part=part, whole=whole: dist.reduce_scatter_single(part, whole),
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
        }
        found = {name: _fastest(call) for name, call in calls.items()}
        rows.append([nbytes, *(f"{found[name] - found['barrier']:.4f}" for name in list(calls)[1:])])
    if dist.get_rank() == 0:
        with OUT.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["bytes", "all_gather_s", "reduce_scatter_s", "all_reduce_s"], *rows])


def _fastest(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):  # the first opens connections
        dist.barrier()
        begin = time.monotonic()
        call()
        dist.barrier()
        times.append(time.monotonic() - begin)
    return min(times[1:])


def main() -> None:
    """Build the hosts, and start a rank on each."""
    cluster = {"nodes": HOSTS, "inter": {"bandwidth": "100 Mbit/s"}}
    testbed = testbed_of(Experiment.from_dict({"cluster": cluster, "run": {"launcher": "testbed"}}))
    assert testbed is not None
    testbed.open()
    try:
        command = testbed.command([sys.executable, __file__, "rank"])
        first = testbed.topology.address(testbed.topology.host_of(0))
        meeting = {"MASTER_ADDR": first, "MASTER_PORT": PORT, "WORLD_SIZE": str(HOSTS)}
        ranks = [subprocess.Popen(command, env={**os.environ, **testbed.environment, **meeting, "RANK": str(own)}) for own in range(HOSTS)]
        assert not any(process.wait() for process in ranks)
    finally:
        testbed.close()


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
