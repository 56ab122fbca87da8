"""Seconds that ``fleetbench tune --simulate-only`` takes for GPTs of 1.3 and 6.7 billion parameters on 8 x 8 H100, on one core.

``python reports/sharding/simulate_only.py`` from the repository's root, on a quiet machine, writes ``simulate_only.csv``.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fleetbench.store import commit

OUT = Path(__file__).with_suffix(".csv")
SHAPE_1_3B = {"layers": 24, "hidden": 2048, "heads": 16}


def main() -> None:
    """Each model at two rates, twice."""
    os.sched_setaffinity(0, {0})
    rows = []
    for model in ("1.3 B", "6.7 B"):
        options = [f"workload.model_options.{name}={value}" for name, value in SHAPE_1_3B.items()] if model == "1.3 B" else []
        for rate in ("400 Gbit/s", "100 Gbit/s"):
            asked = [*options, f"cluster.inter.bandwidth={rate}"]
            for _ in range(2):
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, "-m", "fleetbench", "tune", "examples/gpt_7b.toml", "--simulate-only", "--out", folder]
                    begin = time.monotonic()
                    told = subprocess.run([*command, *(f"--set={one}" for one in asked)], check=True, capture_output=True, text=True)
                    took_s = time.monotonic() - begin
                line = next(line for line in told.stdout.splitlines() if line.startswith("SIMULATED"))
                rows.append([model, rate, f"{took_s:.1f}", commit(), line])
                print(rows[-1], flush=True)
    with OUT.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["model", "each_gpus_link", "seconds", "commit", "answer"], *rows])


if __name__ == "__main__":
    main()
