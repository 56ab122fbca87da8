"""Figures that commands of docs/simulate_only.md, which_sharding.md and estimate.md print; ``python reports/simulate_only/session.py``.

It writes session.csv. No random numbers but the experiment's seeds: the same every time. Minutes of one core.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIMULATED = {
    "400 Gbit/s for each GPU": (),
    "100 Gbit/s": ("--set", "cluster.inter.bandwidth=100 Gbit/s"),
    "one node 30 % slow": ("--set", "cluster.node_overrides=[{nodes=[3], slowdown=1.3}]"),
}
_SLOW = ("--set", "cluster.inter.bandwidth=100 Gbit/s")
_SHORT = ("--set", "strategy.sharding=true", "--set", 'strategy.sharding_configs={stage=3, param_dtype="bfloat16"}')
SHARDED = {"400 Gbit/s": (), "100 Gbit/s": _SLOW, "400 Gbit/s, BF16 gathers": _SHORT, "100 Gbit/s, BF16 gathers": (*_SLOW, *_SHORT)}
KEPT = ("num_trials", "default_s", "step_s", "speedup", "samples_per_s", "tokens_per_s", "fits_in_memory")
PER_GPU = ("mfu", "memory_bytes")
ESTIMATED = ("--gpt", "350M", "--gpu", "H100", "--precision", "bf16")


def main() -> None:
    """Run the commands, and keep their figures."""
    rows = [("command", "figure", "value")]
    for name, more in SIMULATED.items():
        found = json.loads(printed("tune", "examples/gpt_350m.toml", "--simulate-only", "--json", *more))
        rows += [(f"tune --simulate-only, {name}", key, found[key]) for key in KEPT]
        rows += [(f"tune --simulate-only, {name}", key, found["per_trainer"][key]) for key in PER_GPU]
        rows += [(f"tune --simulate-only, {name}", "fastest_other_s", min(rival["step_s"] for rival in found["runners_up"]))]
        ends = [("low", found["low"]), ("high", found["high"])]
        rows += [(f"tune --simulate-only, {name}", *row) for row in (*found["parts"].items(), *ends)]
        rows += [(f"tune --simulate-only, {name}", f"step_s, {case['assumption']}", case["recommended_s"]) for case in found["cases"]]
    for name, more in SHARDED.items():
        found = json.loads(printed("tune", "examples/gpt_7b.toml", "--simulate-only", "--json", *more))
        command = f"tune --simulate-only, gpt_7b, {name}"
        rows += [(command, key, found[key]) for key in KEPT]
        rows += [(command, key, found["per_trainer"][key]) for key in PER_GPU]
        rows += [(command, f"memory, {what}", size) for what, size in found["memory"].items()]
        rows += [(command, *part) for part in found["parts"].items()]
        tried = [("recommended", found["strategy"], found["step_s"])]
        tried += [("runner-up", rival["strategy"], rival["step_s"]) for rival in found["runners_up"]]
        named = [
            (what, "none" if not strategy["sharding"] else json.dumps(strategy["sharding_configs"]), own_s)
            for what, strategy, own_s in tried
        ]
        rows += [(command, f"{what}: {configs}", own_s) for what, configs, own_s in named]
    lines = [
        line for line in printed("estimate", *ESTIMATED).splitlines() if line.startswith(("per GPU:", "estimated compute:", "memory:"))
    ]
    rows += [(f"estimate {' '.join(ESTIMATED)}", *line.split(": ", 1)) for line in lines]
    with (HERE / "session.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def printed(*arguments: str) -> str:
    """What a command of fleetbench prints."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "fleetbench", *arguments, "--out", out]
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


if __name__ == "__main__":
    main()
