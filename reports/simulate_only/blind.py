"""Does the measured speed-up lie in the interval of `fleetbench tune --simulate-only`? Ten drawn clusters of the testbed.

    python reports/simulate_only/blind.py predict    # draws a seed, tunes by simulation alone, writes blind_predictions.json: commit it
    python reports/simulate_only/blind.py measure    # pairs of the file's own strategy and the recommended one; blind_raw.jsonl
    python reports/simulate_only/blind.py tables

Clusters are those of reports/network/declared.py: 2 to 4 hosts, 50 to 200 Mbit/s, 0 to 20 ms, declared and not calibrated; half of them
have stragglers. Their own strategy is Fleet's default, one bucket; every third has a bucket a gradient. ``measure`` runs what is committed.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "network"))

from declared import WARMUP, drawn, git

from fleetbench.config import encode
from fleetbench.errors import EnvironmentLacks, WorkerFailed
from fleetbench.experiment import Experiment
from fleetbench.store import machine, new_run_id, versions
from fleetbench.strategy import DistributedStrategy
from real.job.session import Session
from real.leg import Leg
from tuner.sequential import paired_speedup
from tuner.simulated.answer import tune_simulated

HERE = Path(__file__).parent
PREDICTIONS, RAW = HERE / "blind_predictions.json", HERE / "blind_raw.jsonl"
CLUSTERS, PAIRS, LEG_S, LAUNCHES = 10, 4, 4.0, 2


def environment(seed: int, number: int) -> Experiment:
    """One experiment."""
    declared = drawn(seed, number)
    draw = random.Random(f"{seed}/{number}/stragglers")  # noqa: S311  # not for security
    if number % 2:
        declared["cluster"]["stragglers"] = [
            {"kind": "jitter", "distribution": "lognormal", "mean": round(draw.uniform(0.05, 0.3), 2), "cv": 1.0}
        ]
    if number % 3 == 2:
        declared["strategy"] = {"fuse_all_reduce_ops": False}
    return Experiment.from_dict({**declared, "name": f"blind-{number}"})


def predict() -> None:
    """Draw, tune and write."""
    seed, cells = secrets.randbits(32), []
    for number in range(CLUSTERS):
        experiment = environment(seed, number)
        with tempfile.TemporaryDirectory() as folder:
            found, _ = tune_simulated(experiment, out=Path(folder))
        steps = max(16, 8 * round(LEG_S / found.step_s / 8))
        cell = {"experiment": encode(experiment), "steps": steps, "strategy": encode(found.strategy)}
        cell |= {name: getattr(found, name) for name in ("speedup", "low", "high", "step_s", "default_s")} | {
            "outside": list(found.outside)
        }
        cells.append(cell)
        print(experiment.name, found.line, flush=True)
    text = json.dumps({"seed": seed, "versions": versions(), "cells": cells}, indent=1)
    PREDICTIONS.write_text(text + "\n", encoding="utf-8")


def measure() -> None:
    """A launch a cluster: A B, B A, ... in short legs. Pairs with a void leg are kept, and do not count."""
    if git("status", "--porcelain", str(PREDICTIONS)):
        raise SystemExit(f"{PREDICTIONS} is not committed as it is: commit the predictions first")
    with RAW.open("a", encoding="utf-8") as out:
        commit = git("log", "-1", "--format=%H", "--", str(PREDICTIONS))
        out.write(json.dumps({"kind": "start", "run": new_run_id(), "predictions": commit, "machine": machine()}) + "\n")
        for cell in json.loads(PREDICTIONS.read_text(encoding="utf-8"))["cells"]:
            experiment = Experiment.from_dict(cell["experiment"])
            for _ in range(LAUNCHES):
                try:
                    row = pairs_of(experiment, DistributedStrategy.from_dict(cell["strategy"]), cell["steps"])
                except (EnvironmentLacks, WorkerFailed) as error:
                    row = {"kind": "failed", "name": experiment.name, "error": str(error)}
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(row, flush=True)
                if row["kind"] == "pairs":
                    break


def pairs_of(experiment: Experiment, recommended: DistributedStrategy, steps: int) -> dict[str, Any]:
    """Seconds of a step of both, leg by leg, and which legs count."""
    pairs: list[dict[str, Any]] = []
    with Session(experiment) as session:
        for number in range(PAIRS):
            arms = [("own", experiment.strategy), ("recommended", recommended)]
            pair: dict[str, Any] = {}
            for name, strategy in arms if number % 2 == 0 else arms[::-1]:
                result = session.run(Leg(strategy=strategy, steps=steps, warmup_steps=WARMUP))
                assert result.testbed is not None
                pair |= {name: result.summary.wall_s / steps, f"{name} counts": result.testbed["counts"]}
            pairs.append(pair)
    return {"kind": "pairs", "name": experiment.name, "pairs": pairs}


def tables() -> None:
    """Every cluster, and how many intervals hold what was measured."""
    lines = [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()]
    measured = {line["name"]: line["pairs"] for line in lines if line["kind"] == "pairs"}
    held, counted = 0, 0
    print("| hosts | link | stragglers | recommended | predicted | measured | in the interval |\n|---|---|---|---|---|---|---|")
    for cell in json.loads(PREDICTIONS.read_text(encoding="utf-8"))["cells"]:
        experiment = Experiment.from_dict(cell["experiment"])
        good = [pair for pair in measured.get(experiment.name, []) if pair["own counts"] and pair["recommended counts"]]
        link = experiment.cluster.inter
        assert link is not None
        changes = DistributedStrategy.from_dict(cell["strategy"]).changes() or "Fleet's defaults"
        row = f"| {experiment.cluster.nodes} | {link.bandwidth}, {link.latency} | {len(experiment.cluster.stragglers)} | {changes} "
        row += f"| {cell['speedup']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}] "
        if cell["speedup"] == 1.0 or len(good) < 2:
            print(row + f"| {len(good)} pairs | |")
            continue
        speedup = paired_speedup([pair["own"] for pair in good], [pair["recommended"] for pair in good])
        counted += 1
        held += cell["low"] <= speedup.mean <= cell["high"]
        print(row + f"| {speedup}, n = {len(good)} | {'yes' if cell['low'] <= speedup.mean <= cell['high'] else '**no**'} |")
    print(f"{held} of {counted}")


if __name__ == "__main__":
    {"predict": predict, "measure": measure, "tables": tables}[sys.argv[1]]()
