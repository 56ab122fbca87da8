"""Two checkouts in turns: are steps and starts of one slower than those of the other?

    python reports/redesign/in_turns.py BEFORE AFTER OUT.csv ROUNDS [CASE ...]
    python reports/redesign/in_turns.py table OUT.csv

A round runs every case in the order before, after, after, before. A line of OUT.csv: round, place in the round, commit, case, seconds,
and how many cores others kept busy. Cases of steps are the median step in seconds; cases of starts a whole command.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

COMMAND = (sys.executable, "-c", "from fleetbench.cli.main import main; raise SystemExit(main())")
STEPS = 300
SCRIPT = f"""
import json, statistics, time
import torch
from fleetbench import fleet
fleet.init()
torch.manual_seed(0)
model = fleet.distributed_model(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)]))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
inputs, times = torch.randn(64, 256), []
for step in range({STEPS}):
    begun = time.perf_counter()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    times.append(time.perf_counter() - begun)
if fleet.worker_index() == 0:
    open("step_s.json", "w").write(json.dumps(statistics.median(times[50:])))
"""
"""Twelve layers on two ranks: the time of a step is the engine's and gloo's, hardly the model's."""
SMALL = SCRIPT.replace("torch.nn.Linear(256, 256) for _ in range(12)", "torch.nn.Linear(16, 16) for _ in range(120)").replace(
    "(64, 256)", "(4, 16)"
)
"""240 small parameters on one rank: what a parameter costs."""

REAL = ("real", "--json", "--set", f"workload.steps={STEPS}", "--set", "workload.eval_every=1000")
STEP_CASES = {
    "collective": REAL,
    "local_sgd": (*REAL, "--set", "strategy.localsgd=true", "--set", "strategy.localsgd_configs.k_steps=4"),
    "servers": (*REAL, "--set", "strategy.mode=ps", "--set", "strategy.a_sync=true", "--set", "cluster.servers=1"),
    "script": ("launch", "--nproc", "2", "script.py"),
    "small": ("launch", "--nproc", "1", "small.py"),
}
START_CASES = {
    "import": (sys.executable, "-c", "import fleetbench"),
    "help": (*COMMAND, "--help"),
    "sim": (*COMMAND, "sim", "cluster.toml", "--set", "workload.steps=2"),
    "real": (*COMMAND, "real", "--set", "workload.steps=1", "--set", "run.warmup_steps=0"),
}


def measured(checkout: Path, case: str, folder: Path, profiles: Path) -> float:
    """Seconds of a step, or of a whole command; with a profile of the quickstart at hand. Raises ``RuntimeError`` where it fails."""
    shutil.copytree(profiles, folder / "runs" / "profiles")
    shutil.copy(checkout / "examples" / "sixty_four_gpus.toml", folder / "cluster.toml")
    environment = _environment(checkout)
    if case in START_CASES:
        begun = time.perf_counter()
        _run(START_CASES[case], folder, environment)
        return time.perf_counter() - begun
    name = case.removeprefix("step_")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "small.py").write_text(SMALL, encoding="utf-8")
    out = _run((*COMMAND, *STEP_CASES[name]), folder, environment)
    if name in ("script", "small"):
        return float(json.loads((folder / "step_s.json").read_text(encoding="utf-8")))
    return float(json.loads(out)["step_s"]["p50"])


def _environment(checkout: Path) -> dict[str, str]:
    """The checkout's code goes before what PYTHONPATH has of libraries that another version needs."""
    paths = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "FLEETBENCH_BUSY": "accept"}


def _run(command: tuple[str, ...], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def main(before: Path, after: Path, out: Path, rounds: int, wanted: Sequence[str]) -> None:
    """Append lines to ``out``."""
    commits = {path: _commit(path) for path in (before, after)}
    cases = wanted or [*START_CASES, *(f"step_{name}" for name in STEP_CASES)]
    profiles = {}
    for checkout in (before, after):  # each its own: one of an older method would be taken again
        profiles[checkout] = Path(tempfile.mkdtemp(prefix="profiles-"))
        _run((*COMMAND, "sim", "--out", str(profiles[checkout])), profiles[checkout], _environment(checkout))
    with out.open("a", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        if not out.stat().st_size:
            rows.writerow(["round", "place", "commit", "which", "case", "seconds", "foreign_cores"])
        for number in range(rounds):
            for case in cases:
                for place, checkout in enumerate((before, after, after, before)):
                    foreign = _foreign()
                    with tempfile.TemporaryDirectory() as folder:
                        seconds = measured(checkout, case, Path(folder) / "run", profiles[checkout] / "profiles")
                    which = "before" if checkout == before else "after"
                    rows.writerow([number, place, commits[checkout], which, case, f"{seconds:.6f}", f"{foreign:.3f}"])
                    file.flush()


def _foreign() -> float:
    """Cores that are busy while nothing of ours runs."""
    return psutil.cpu_percent(interval=0.5) / 100 * (psutil.cpu_count() or 1)


def _commit(checkout: Path) -> str:
    return subprocess.run(("git", "rev-parse", "--short", "HEAD"), cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S607  # the user's own git


def table(path: Path) -> None:
    """Print the medians, the ratio after / before of each round's means, and what two runs of one commit differ by in a round."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    print("| case | before, median | after, median | after / before, median [min, max] | same commit twice, largest ratio |")
    print("|---|---|---|---|---|")
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {(row["which"], int(row["round"]), int(row["place"])): float(row["seconds"]) for row in rows if row["case"] == case}
        rounds = sorted({number for _, number, _ in found})
        medians = {which: statistics.median(s for (w, _, _), s in found.items() if w == which) for which in ("before", "after")}
        pairs = [[(found["before", n, 0], found["before", n, 3]), (found["after", n, 1], found["after", n, 2])] for n in rounds]
        ratios = [sum(late) / sum(early) for early, late in pairs]
        same = max(max(pair) / min(pair) for round_ in pairs for pair in round_)
        middle = f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
        print(f"| {case} | {medians['before']:.4g} s | {medians['after']:.4g} s | {middle} | {same:.3f} |")


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
