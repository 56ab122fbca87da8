"""Do ordinary launches of a tuned script reach the target as much sooner as the verdict says? Four, two processes each.

Run from the repository's root, with nothing else running (about half an hour): ``python reports/tuner/scripts.py [SCRIPT ...]``. Appends to
``scripts.json`` and prints README.md's table. ``--quick FILE`` checks in minutes that all of it runs.

``fleetbench tune`` gives a verdict on a script with a target. Then the script runs as its user would start it, without and with the
finalist's strategy, which is ``recommended.toml`` where it is to be used, in turns (A B B A ...), to its own end: ``timed.py`` keeps
when each update had which loss. A launch is at its target as the product counts: where a line through the means of 20 updates, over both
trainers, crosses it. Seconds are those of an update after the first 10, times updates. Each pair has a seed of its own, which the
regression alone reads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fleetbench.store import commit, machine, versions
from fleetbench.strategy import DistributedStrategy
from fleetbench.target import crossing
from tuner.recommendation import Recommendation
from tuner.sequential import paired_speedup
from tuner.to_target import on_line

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WINDOW, SKIPPED, PROCESSES = 20, 10, 2
FLEETBENCH = (sys.executable, "-P", "-m", "fleetbench")
LAUNCH = (*FLEETBENCH, "launch", "--nproc", f"{PROCESSES}")


@dataclass(frozen=True)
class Case:
    """A script and its target; ``{}`` in its arguments stands for the file of a strategy."""

    script: str
    target: float
    steps: int
    """Updates of the script to its end."""
    arguments: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


CASES = {
    "accumulation": Case("examples/accumulation.py", 0.1, 280, ("{}",)),
    "gpt": Case("examples/gpt.py", 2.45, 400, ("--epochs", "1", "--updates", "400", "--strategy", "{}")),
    "gpt, a low rate": Case(
        "examples/gpt.py",
        2.65,
        400,
        ("--epochs", "1", "--updates", "400", "--lr", "7.5e-4", "--strategy", "{}"),
        ("tune.lr_scale=[2, 4]",),
    ),
    "regression": Case("reports/tuner/regression.py", 0.55, 400, ("{}",), ()),
}


def tuned(case: Case, folder: Path, more: tuple[str, ...]) -> dict[str, Any]:
    """The verdict; the script's own strategy is Fleet's default."""
    default = folder / "default.toml"
    DistributedStrategy().save(default)
    keys = (f"workload.target_loss={case.target}", f"workload.steps={case.steps}", "tune.budget_minutes=5", *case.settings, *more)
    settings = [word for key in keys for word in ("--set", key)]
    script = [str(ROOT / case.script), *(word.format(default) for word in case.arguments)]
    command = [*FLEETBENCH, "tune", "--json", "--out", str(folder / "runs"), *settings, "--", *LAUNCH, *script]
    begin = time.monotonic()
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    return {"tune_s": round(time.monotonic() - begin, 1), "recommendation": json.loads(done.stdout)}


def launched(case: Case, strategy: Path, folder: Path, number: int) -> dict[str, float | None]:
    """Updates and seconds to the target of an ordinary launch, and seconds of an update."""
    kept = folder / f"launch-{number}"
    script = [str(ROOT / case.script), *(word.format(strategy) for word in case.arguments)]
    command = [*LAUNCH, str(HERE / "timed.py"), str(kept), *script]
    environment = {**os.environ, "FLEETBENCH_SEED": str(number // 2)}
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, env=environment)
    told = np.array([json.loads(Path(f"{kept}.{rank}.json").read_text(encoding="utf-8")) for rank in range(PROCESSES)])
    losses, seconds = told[..., 1].mean(0), told[0, :, 0]
    windows = losses[: len(losses) // WINDOW * WINDOW].reshape(-1, WINDOW).mean(1)
    found = crossing([(WINDOW * (place + 1), float(loss)) for place, loss in enumerate(windows)], case.target)
    last = len(seconds) - 1 if found is None else found.step - 1
    step_s = float(seconds[last] - seconds[SKIPPED]) / (last - SKIPPED)
    middles = [(WINDOW * place + (WINDOW + 1) / 2, float(loss)) for place, loss in enumerate(windows)]
    updates = None if found is None else on_line(middles, case.target, found.smooth)[0]
    return {"updates": updates, "step_s": step_s, "target_s": None if updates is None else updates * step_s}


def measured(name: str, rounds: int, more: tuple[str, ...]) -> dict[str, Any]:
    """A script's verdict and its launches."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = tuned(case, folder, more)
        (path,) = (folder / "runs").glob("*-tune-*")
        told, files = Recommendation.load(path), (folder / "default.toml", folder / "finalist.toml")
        strategy = next(arm.strategy for arm in told.arms if arm.name == (told.finalist or "candidate 1"))
        strategy.save(files[1])
        launches: tuple[list[Any], list[Any]] = ([], [])
        for number in range(rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                launches[which].append(launched(case, files[which], folder, 2 * number + which))
    head = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine(), "versions": versions()}
    return {
        **head,
        "name": name,
        "target": case.target,
        **found,
        "strategy": strategy.changes(),
        "default": launches[0],
        "finalist": launches[1],
    }


def row(entry: dict[str, Any]) -> str:
    """A row of README.md's table."""
    told, default, own = entry["recommendation"], entry["default"], entry["finalist"]
    ends = [told.get("to_target_low") or told["low"], told.get("to_target_high") or told["high"]]
    known = [(one["target_s"], two["target_s"]) for one, two in zip(default, own, strict=True) if one["target_s"] and two["target_s"]]
    again = "" if len(known) < 2 else str(paired_speedup(*map(list, zip(*known, strict=True))))
    said = told.get("to_target") or told["speedup"]
    updates = "to".join(f" {np.median([one['updates'] or math.nan for one in runs]):.0f} " for runs in (default, own))
    promised = f"{said:.2f}x [{ends[0]:.2f}, {ends[1]:.2f}]"
    return f"| {entry['name']} | {told['verdict']} | {promised} | {again} | {updates} | {entry['tune_s']:.0f} s |"


def main() -> None:
    """Measure the scripts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=", ".join(CASES))
    parser.add_argument("--quick", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    raw, rounds = (arguments.quick, 2) if arguments.quick else (HERE / "scripts.json", 6)
    entries = json.loads(raw.read_text(encoding="utf-8")) if raw.exists() else []
    for name in arguments.scripts or CASES:
        entries.append(measured(name, rounds, ("tune.pairs=4",) if arguments.quick else ()))
        raw.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        print(row(entries[-1]), flush=True)


if __name__ == "__main__":
    main()
