"""What a lone all-reduce takes on the testbed's links, and what the simulator says of the links as declared.

    python reports/network/all_reduces.py measure    # about two minutes; appends to all_reduces_raw.jsonl
    python reports/network/all_reduces.py tables

Each pair of hosts and link was one run of ``fleetbench profile --collectives``: all-reduces one after the other, nothing beside them.
Later versions have no such command: ``measure`` needs a checkout of the commit that the raw rows name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

from fleetbench.experiment import Experiment
from fleetbench.store import commit, machine
from sim.network.gloo import num_segments
from sim.run import simulate

HERE = Path(__file__).parent
RAW = HERE / "all_reduces_raw.jsonl"
CELLS = [(hosts, mbit, latency_us) for hosts in (2, 3, 4) for mbit, latency_us in ((50, 0), (100, 0), (200, 0), (100, 1000), (100, 5000))]
SIZES = [16 * 4**power * 1024 for power in range(5)]


def declared(hosts: int, mbit: int, latency_us: int, nbytes: int) -> dict[str, Any]:
    """One bucket of ``nbytes`` after a millisecond of compute."""
    return {
        "schema": 1,
        "name": "all-reduces",
        "workload": {
            "model": "layers",
            "steps": 1,
            "layers": [{"name": "block", "params": nbytes // 4, "forward": "0.5 ms", "backward": "0.5 ms"}],
        },
        "cluster": {"nodes": hosts, "collective": "gloo", "inter": {"bandwidth": f"{mbit} Mbit/s", "latency": f"{latency_us} us"}},
        "run": {"launcher": "testbed", "device": "emulated"},
    }


def measure() -> None:
    """Every cell once."""
    with RAW.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"kind": "start", "commit": commit(), "machine": machine()}) + "\n")
        for hosts, mbit, latency_us in CELLS:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "experiment.toml")
                file.write_text(tomli_w.dumps(declared(hosts, mbit, latency_us, SIZES[0])), encoding="utf-8")
                sizes = ["--min-bytes", f"{SIZES[0]} B", "--max-bytes", f"{SIZES[-1]} B", "--factor", "4", "--iterations", "20"]
                command = [
                    sys.executable,
                    "-m",
                    "fleetbench",
                    "profile",
                    str(file),
                    "--collectives",
                    "--kinds",
                    "all_reduce",
                    *sizes,
                    "--json",
                ]
                ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
            row = {"kind": "cell", "hosts": hosts, "mbit": mbit, "latency_us": latency_us, "rc": ended.returncode}
            row |= {"rows": json.loads(ended.stdout)} if ended.returncode == 0 else {"error": ended.stderr[-600:]}
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(hosts, mbit, latency_us, ended.returncode, flush=True)


def predicted_s(hosts: int, mbit: int, latency_us: int, nbytes: int) -> float:
    """Simulated seconds of one all-reduce."""
    return simulate(Experiment.from_dict(declared(hosts, mbit, latency_us, nbytes)), timeline=False).summary.wall_s - 1e-3


def tables() -> None:
    """Measured milliseconds, and what is missing in the simulated ones: in all, and of each of the ring's messages."""
    columns = ("hosts", "link", "latency", "size", "measured, ms", "simulated, ms", "error", "missing a message, ms")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for line in RAW.read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        for row in cell.get("rows", {}).get("rows", []):
            hosts, nbytes = cell["hosts"], row["size_bytes"]
            measured_s = row["time_us"] * 1e-6
            simulated_s = predicted_s(hosts, cell["mbit"], cell["latency_us"], nbytes)
            messages = 2 * num_segments(nbytes, hosts) * (hosts - 1) // hosts
            missing_ms = 1e3 * (measured_s - simulated_s) / messages
            link = f"{cell['mbit']} Mbit/s | {cell['latency_us']} us | {nbytes}"
            error = f"{simulated_s / measured_s - 1:+.1%}"
            print(f"| {hosts} | {link} | {1e3 * measured_s:.2f} | {1e3 * simulated_s:.2f} | {error} | {missing_ms:.3f} |")


if __name__ == "__main__":
    {"measure": measure, "tables": tables}[sys.argv[1]]()
