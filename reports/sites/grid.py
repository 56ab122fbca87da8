"""Seconds per step of two sites of two hosts: K of flat Local SGD and of a worker per site, simulated, and some cells on the testbed.

From the repository's root: ``python reports/sites/grid.py`` simulates the grid, writes ``simulated.csv`` and prints the table (seconds).
``python reports/sites/grid.py --measure`` needs root: it simulates and runs a few cells on the testbed, with 100 Mbit/s within, which a
machine of two cores carries; appends to ``measured.jsonl``, about a minute a cell. Trainers sleep instead of
computing, and send real bytes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from fleetbench.experiment import Experiment
from fleetbench.store import commit
from sim.run import simulate

HERE = Path(__file__).parent
KS = (1, 2, 4, 8, 16, 32, 64)
WAYS = ("synchronous", "flat", "site", "site, beside")
"""All trainers in every step; Local SGD of trainers; of sites; of sites, whose exchange runs beside half of a round's steps."""
MEASURED = (("synchronous", 1), ("flat", 4), ("site", 4), ("site, beside", 4), ("flat", 16), ("site", 16))


def experiment(way: str, k: int, within: str, params: int, steps: int, **run: Any) -> dict[str, Any]:
    """One cell: 4 layers of equal parameters, 120 ms of compute a step; 50 Mbit/s and 20 ms between sites."""
    local: dict[str, Any] = {"k_steps": k, "outer_lr": 0.7, "outer_momentum": 0.9}
    if way.startswith("site"):
        local["worker_trainers"] = 2
    if way == "site, beside":
        local["overlap_steps"] = k // 2
    strategy = {} if way == "synchronous" else {"localsgd": True, "localsgd_configs": local}
    link = {"bandwidth": "50 Mbit/s", "latency": "10 ms"}
    return {
        "name": "sites",
        "workload": {
            "model": "layers",
            "layers": [{"name": "layer", "params": params // 4, "forward": "10 ms", "backward": "20 ms", "repeat": 4}],
            "optimizer": "sgd",
            "steps": steps,
        },
        "cluster": {
            "nodes": 4,
            "inter": {"bandwidth": within},
            "sites": [{"nodes": 2, "count": 2, "up": link}],
            "collective": "gloo",
        },
        "strategy": strategy,
        "run": {"warmup_steps": k, **run},
    }


def simulated_s(cell: dict[str, Any]) -> float:
    """Mean seconds per step."""
    return simulate(Experiment.from_dict(cell), timeline=False).summary.step_s["mean"]


def grid(params: int) -> dict[tuple[str, int], float]:
    """Seconds per step of every cell; synchronous training has one."""
    found = {("synchronous", 1): simulated_s(experiment("synchronous", 1, "1 Gbit/s", params, 8))}
    for way in WAYS[1:]:
        for k in KS:
            if way != "site, beside" or k > 1:
                found[way, k] = simulated_s(experiment(way, k, "1 Gbit/s", params, 4 * k))
    return found


def measure(way: str, k: int, folder: Path) -> dict[str, Any]:
    """One cell on the testbed, and simulated with the same links."""
    cell = experiment(way, k, "100 Mbit/s", 250_000, 32, launcher="testbed", device="emulated")
    path = folder / "cell.toml"
    path.write_text(tomli_w.dumps(cell), encoding="utf-8")
    command = [sys.executable, "-m", "fleetbench", "real", str(path), "--out", str(folder), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    line: dict[str, Any] = {"way": way, "k": k, "commit": commit(), "load": os.getloadavg()[0], "simulated_s": simulated_s(cell)}
    if ran.returncode:
        return line | {"failed": ran.stderr.strip().splitlines()[-2:]}
    summary = json.loads(ran.stdout)
    testbed = summary.get("testbed") or {}
    kept = ("counts", "void_runs", "largest_link_error", "sentinel_moved")
    return line | {"measured_s": summary["step_s"]["mean"], **{name: testbed.get(name) for name in kept}}


def main() -> None:
    """Simulate the grid, or measure some cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        for way, k in MEASURED:
            with TemporaryDirectory() as folder, (HERE / "measured.jsonl").open("a", encoding="utf-8") as out:
                found = measure(way, k, Path(folder))
                print(found, flush=True)
                out.write(json.dumps(found) + "\n")
        return
    with (HERE / "simulated.csv").open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["params", "way", "k", "step_s"])
        for params in (1_000_000, 10_000_000):
            found = grid(params)
            writer.writerows([params, *cell, f"{seconds:.6f}"] for cell, seconds in found.items())
            print(f"{params:,} parameters; synchronous: {found['synchronous', 1]:.3f}")
            print("| K | " + " | ".join(WAYS[1:]) + " |\n|---" + "|---" * 3 + "|")
            for k in KS:
                print(f"| {k} | " + " | ".join(f"{found[way, k]:.3f}" if (way, k) in found else "" for way in WAYS[1:]) + " |")


if __name__ == "__main__":
    main()
