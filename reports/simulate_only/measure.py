"""How long `fleetbench tune --simulate-only` takes on one core, and the simulator's errors that its intervals rest on.

python reports/simulate_only/measure.py            # runs every case once, and appends a line each to raw.jsonl
python reports/simulate_only/measure.py --errors   # prints the errors, from the files of reports/fidelity; runs nothing
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from fleetbench.store import commit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVED = ("--set", "strategy.mode=ps", "--set", "cluster.servers=2")
POWERS = ",".join(str(2**power) for power in range(8))
CASES = {
    "64 trainers, with sensitivity": ("sixty_four_gpus", ()),
    "64 trainers, a GPT of 350 M, 100 Gbit/s": ("gpt_350m", ("--set", "cluster.inter.bandwidth=100 Gbit/s")),
    "8 sizes, 8 to 1,024 trainers": ("sixty_four_gpus", ("--sweep", f"cluster.nodes={POWERS}")),
    "8 sizes, 8 to 1,024 trainers, a GPT of 350 M": ("gpt_350m", ("--sweep", f"cluster.nodes={POWERS}")),
    "64 sizes, 8 to 512 trainers": ("sixty_four_gpus", ("--sweep", "cluster.nodes=1..64")),
    "8 trainers, 2 servers, with sensitivity": ("sixty_four_gpus", (*SERVED, "--set", "cluster.nodes=1")),
}
FIDELITY = {
    "first look, environments not run before": ("earlier/predictions.json", "earlier/raw.jsonl"),
    "fresh environments, after the mend": ("earlier/second_predictions.json", "earlier/second_raw.jsonl"),
    "re-test of the first ones": ("predictions.json", "raw.jsonl"),
}


def main() -> None:
    """Measure, or print the errors."""
    if "--errors" in sys.argv:
        for name, files in FIDELITY.items():
            errors = log_ratio_errors(*(ROOT / "reports" / "fidelity" / file for file in files))
            print(f"{name}: {len(errors)} pairs, mean {errors.mean():.4f}, 90 % within {np.quantile(errors, 0.9):.4f}")
        for folder in ("network/earlier", "network"):
            errors = declared_errors(ROOT / "reports" / folder)
            print(f"{folder}: {len(errors)} pairs, mean {errors.mean():.4f}, 90 % within {np.quantile(errors, 0.9):.4f}")
        return
    for name in CASES:
        line = measured(name)
        print(line)
        with (HERE / "raw.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def measured(name: str) -> dict[str, object]:
    """One case, alone on one core: seconds of the process, imports included, and of the clock."""
    example, more = CASES[name]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "fleetbench", "tune", f"examples/{example}.toml", "--simulate-only", "--json", "--out", out, *more]
        begin_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    own_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "case": name,
        "process_s": round(own_s, 2),
        "clock_s": round(time.monotonic() - begin_s, 2),
        "load": round(os.getloadavg()[0], 1),
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def log_ratio_errors(predictions: Path, raw: Path) -> np.ndarray:
    """Of every two strategies of one environment that were not calibrated with: predicted minus measured log-ratio, its size."""
    said = json.loads(predictions.read_text(encoding="utf-8"))["environments"]
    lines = map(json.loads, raw.read_text(encoding="utf-8").splitlines())
    legs = [leg for leg in lines if leg["kind"] == "leg" and leg["counts"]]
    errors = []
    for environment, known in said.items():
        bias = []
        for strategy, cell in known["cells"].items():
            own = [leg["wall_s"] / leg["steps"] for leg in legs if (leg["environment"], leg["strategy"]) == (environment, strategy)]
            if own and not cell["calibrated"]:
                bias.append(math.log(cell["sim"]["wall_s"] / cell["steps"] / np.mean(own)))
        errors += [abs(one - other) for one, other in itertools.combinations(bias, 2)]
    return np.array(errors)


def declared_errors(folder: Path) -> np.ndarray:
    """The same of declared clusters, of which nothing is calibrated."""
    legs = map(json.loads, (folder / "declared_raw.jsonl").read_text(encoding="utf-8").splitlines())
    measured_s = {(leg["cluster"], leg["strategy"]): leg["step_s"] for leg in legs if leg["kind"] == "leg" and leg["counts"]}
    bias: dict[str, list[float]] = {}
    for cell in json.loads((folder / "declared_predictions.json").read_text(encoding="utf-8"))["cells"]:
        cluster = cell["declared"]["name"]
        if (cluster, cell["strategy"]) in measured_s:
            bias.setdefault(cluster, []).append(math.log(cell["predicted_s"]["simulator"] / measured_s[cluster, cell["strategy"]]))
    return np.array([abs(one - other) for own in bias.values() for one, other in itertools.combinations(own, 2)])


if __name__ == "__main__":
    main()
