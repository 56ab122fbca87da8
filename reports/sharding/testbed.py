"""Sharded steps on the testbed beside their predictions: four hosts, emulated compute, 50 to 200 Mbit/s.

From the repository's root, on a quiet machine: ``python reports/sharding/testbed.py predict`` writes ``predictions.csv`` and its digest,
``... measure`` (15 minutes) adds a line a leg to ``raw.jsonl``, and ``... show`` prints the tables of README.md.

Nothing is fitted: links are as declared, a message takes 100 us, and collectives are gloo's.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleetbench.experiment import Experiment
from fleetbench.result import step_s_of
from fleetbench.store import commit, machine, versions
from fleetbench.strategy import DistributedStrategy
from real.job.session import Session
from real.leg import Leg
from sim.run import simulate

HERE = Path(__file__).parent
PREDICTIONS, DIGEST, RAW = HERE / "predictions.csv", HERE / "predictions.sha256", HERE / "raw.jsonl"
HOSTS, STEPS, WARMUP, ROUNDS = 4, 4, 2, 2


def _sharded(**configs: Any) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": configs}


STRATEGIES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "stage 1, k = 2": _sharded(stage=1) | {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "stage 2": _sharded(stage=2),
    "stage 2, k = 2": _sharded(stage=2) | {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "stage 3": _sharded(stage=3),
    "stage 3, spread over 2": _sharded(stage=3, reshard_after_forward=2),
    "stage 2, degree 2": _sharded(stage=2, sharding_degree=2),
    "stage 3, degree 2": _sharded(stage=3, sharding_degree=2),
    "stage 3, BF16 wire": _sharded(stage=3) | {"bf16_allreduce": True},
}
MODELS: dict[str, list[dict[str, Any]]] = {
    "equal blocks": [
        {"name": "embedding", "params": 150_000, "forward": "5 ms", "backward": "10 ms"},
        {"name": "block", "repeat": 8, "params": 200_000, "forward": "20 ms", "backward": "40 ms"},
        {"name": "head", "params": 100_000, "forward": "5 ms", "backward": "10 ms"},
    ],
    "growing blocks": [
        {"name": f"block{number}", "params": 60_000 << number // 2, "forward": "40 ms", "backward": "80 ms"} for number in range(8)
    ],
}


def cells() -> list[tuple[str, int]]:
    """Models, and Mbit/s of a host's link each way: each pair is one launch."""
    return [("equal blocks", 50), ("equal blocks", 100), ("equal blocks", 200), ("growing blocks", 100)]


def experiment(model: str, rate: int) -> Experiment:
    """One cell, without a strategy."""
    return Experiment.from_dict(
        {
            "name": "sharding",
            "workload": {"model": "layers", "layers": MODELS[model], "steps": STEPS},
            "cluster": {"nodes": HOSTS, "inter": {"bandwidth": f"{rate} Mbit/s", "latency": "100 us"}, "collective": "gloo"},
            "run": {"device": "emulated", "launcher": "testbed", "warmup_steps": WARMUP},
        }
    )


def predict() -> None:
    """Write the predictions and their digest. Refuses to replace them."""
    if PREDICTIONS.exists():
        raise SystemExit(f"{PREDICTIONS} is sealed")
    with PREDICTIONS.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["model", "mbit_per_s", "strategy", "predicted_s"])
        for model, rate in cells():
            for name, fields in STRATEGIES.items():
                asked = experiment(model, rate).replace(strategy=DistributedStrategy.from_dict(fields))
                rows.writerow([model, rate, name, f"{step_s_of(simulate(asked)):.6f}"])
    DIGEST.write_text(hashlib.sha256(PREDICTIONS.read_bytes()).hexdigest() + "\n", encoding="utf-8")


def measure() -> None:
    """Run every cell's strategies, forwards and then backwards; what the machine disturbed is kept, and marked void."""
    assert hashlib.sha256(PREDICTIONS.read_bytes()).hexdigest() == DIGEST.read_text(encoding="utf-8").strip(), "predictions have changed"
    for model, rate in cells():
        with Session(experiment(model, rate)) as session:
            for round_ in range(ROUNDS):
                for name in list(STRATEGIES)[:: -1 if round_ % 2 else 1]:
                    strategy = DistributedStrategy.from_dict(STRATEGIES[name])
                    run = session.run(Leg(strategy=strategy, steps=STEPS, warmup_steps=WARMUP, start="initial"))
                    void = any(line["what"] == "testbed.quiet" for line in run.summary.skipped)
                    told = {"model": model, "mbit_per_s": rate, "strategy": name, "round": round_, "step_s": step_s_of(run), "void": void}
                    stamp = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "torch": versions()["torch"]}
                    with RAW.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(told | stamp | {"machine": machine()}) + "\n")
                    print(told, flush=True)


def show() -> None:
    """Print the tables."""
    with PREDICTIONS.open(encoding="utf-8") as file:
        predicted = {(row["model"], int(row["mbit_per_s"]), row["strategy"]): float(row["predicted_s"]) for row in csv.DictReader(file)}
    measured: dict[tuple[str, int, str], list[float]] = {}
    for line in map(json.loads, RAW.read_text(encoding="utf-8").splitlines()):
        if not line["void"]:
            measured.setdefault((line["model"], line["mbit_per_s"], line["strategy"]), []).append(line["step_s"])
    errors = {key: predicted[key] / statistics.median(found) - 1 for key, found in measured.items()}
    print("| strategy | " + " | ".join(f"{model}, {rate}" for model, rate in cells()) + " |")
    print("|---|" + "---|" * len(cells()))
    for name in STRATEGIES:
        texts = []
        for key in ((model, rate, name) for model, rate in cells()):
            found = measured.get(key)
            texts.append("void" if found is None else f"{statistics.median(found):.3f} s, {100 * errors[key]:+.1f} %")
        print(f"| {name} | " + " | ".join(texts) + " |")
    sizes = sorted(abs(error) for error in errors.values())
    noise = max((max(found) / min(found) - 1 for found in measured.values() if len(found) > 1), default=0.0)
    pairs = [
        (statistics.median(measured[one]) - statistics.median(measured[other]), predicted[one] - predicted[other])
        for one, other in itertools.combinations(measured, 2)
        if one[:2] == other[:2] and abs(statistics.median(measured[one]) / statistics.median(measured[other]) - 1) > noise
    ]
    right = sum((real > 0) == (simulated > 0) for real, simulated in pairs)
    worst = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    print(f"\nmean |error| {100 * statistics.mean(sizes):.1f} %, p95 {100 * worst:.1f} %, of {len(sizes)} cells")
    print(f"legs of one cell differ by at most {100 * noise:.1f} %; order right in {right} of {len(pairs)} pairs that differ by more")


if __name__ == "__main__":
    {"predict": predict, "measure": measure, "show": show}[sys.argv[1]]()
