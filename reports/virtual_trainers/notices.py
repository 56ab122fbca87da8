"""Which workloads notice K? Steps to a loss that every K reaches, by virtual trainers, with like and with unlike data.

    python reports/virtual_trainers/notices.py          # notices.jsonl, a line a training
    python reports/virtual_trainers/notices.py table    # the table of README.md from its lines

Eight trainers of SGD, K = 1, 4, 16 and 64, three seeds. Of each seed the loss is the lowest that all four values of K hold for three
evaluations in a row; a workload notices K where the most steps to it are more than 1.1 times the fewest, as ``fleetbench sim`` says it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fleetbench.experiment import Experiment
from fleetbench.store import commit
from sim.learning.virtual_training import train

RAW = Path(__file__).with_name("notices.jsonl")
K, SEEDS, UNLIKE, TRAINERS, NOTICED = (1, 4, 16, 64), (0, 1, 2), (0.0, 0.8), 8, 1.1
WORKLOADS: dict[str, dict[str, Any]] = {
    "digits_mlp on digits": {"model": "digits_mlp", "model_options": {"hidden": 32}, "batch_size": 16, "lr": 0.1, "steps": 512},
    "mlp on a noisy teacher": {
        "model": "mlp",
        "model_options": {"hidden": 32, "depth": 1},
        "data": "synthetic",
        "data_options": {"samples": 20_000, "teacher": 32, "noise": 0.2},
        "batch_size": 8,
        "lr": 0.2,
        "steps": 768,
    },
    "digits_cnn on digits": {
        "model": "digits_cnn",
        "model_options": {"channels": 8, "hidden": 32},
        "batch_size": 16,
        "lr": 0.1,
        "steps": 512,
    },
    "gpt on pydocs": {
        "model": "gpt",
        "model_options": {"vocab": 257, "hidden": 32, "layers": 2, "heads": 2, "positions": 32},
        "data": "pydocs",
        "data_options": {"length": 32, "held_out": 64},
        "batch_size": 4,
        "lr": 0.2,
        "steps": 512,
    },
    "word2vec on pydocs": {
        "model": "word2vec",
        "model_options": {"vocab": 500, "dim": 16},
        "data": "pydocs",
        "data_options": {"held_out": 4000},
        "batch_size": 32,
        "lr": 2.0,
        "steps": 768,
    },
}
WORKLOADS["word2vec on pydocs, lr = 16"] = WORKLOADS["word2vec on pydocs"] | {"lr": 16.0}
"""At 2 its losses fall alike whatever K is, to 2.7; at 24 K = 64 diverges."""


def experiment(workload: str, k_steps: int, unlike: float, seed: int) -> Experiment:
    """One training; K = 1 is synchronous training."""
    local = {"localsgd": True, "localsgd_configs": {"k_steps": k_steps, "begin_step": 1}} if k_steps > 1 else {}
    data = {
        "workload": {**WORKLOADS[workload], "optimizer": "sgd", "eval_every": 16, "unlike_data": unlike},
        "cluster": {"nodes": TRAINERS, "trainers_per_node": 1, "inter": {"bandwidth": "1 Gbit/s", "latency": "50 us"}},
        "strategy": local,
        "run": {"seed": seed, "warmup_steps": 0},
    }
    return Experiment.from_dict(data)


def main() -> None:
    """Train, a line each; what is there is not trained again."""
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()] if RAW.exists() else []
    known = {(row["workload"], row["k"], row["unlike"], row["seed"]) for row in rows}
    for case in product(WORKLOADS, K, UNLIKE, SEEDS):
        if case in known:
            continue
        workload, k_steps, unlike, seed = case
        learnt = train(experiment(workload, k_steps, unlike, seed))
        row = {"workload": workload, "k": k_steps, "unlike": unlike, "seed": seed, "held_out": learnt.held_out, "seconds": learnt.seconds}
        with RAW.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"commit": commit()}) + "\n")


def _steps(losses: dict[int, list[float]]) -> dict[int, int]:
    """Evaluations until each K is at the lowest loss that all of them hold for three in a row."""

    def held(of_one: list[float], place: int) -> float:
        return max(of_one[place : place + 3])

    target = max(min(held(own, place) for place in range(len(own) - 2)) for own in losses.values())
    return {k: 1 + next(place for place in range(len(own) - 2) if held(own, place) <= target) for k, own in losses.items()}


def table() -> None:
    """Medians over the seeds."""
    rows = [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()]
    print("| workload | unlike data | K = 1 | 4 | 16 | 64 | loss | notices K |\n|---|---|---|---|---|---|---|---|")
    for workload, unlike in product(WORKLOADS, UNLIKE):
        own = [row for row in rows if (row["workload"], row["unlike"]) == (workload, unlike)]
        by_seed = []
        targets = []
        for seed in SEEDS:
            losses = {row["k"]: [loss for _, loss in row["held_out"]] for row in own if row["seed"] == seed}
            if len(losses) < len(K) or any(math.isnan(loss) for of_one in losses.values() for loss in of_one):
                continue
            by_seed.append(_steps(losses))
            targets.append(max(min(of_one) for of_one in losses.values()))
        if not by_seed:
            continue
        medians = [16 * statistics.median(steps[k] for steps in by_seed) for k in K]
        noticed = sum(max(steps.values()) > NOTICED * min(steps.values()) for steps in by_seed)
        cells = " | ".join(f"{steps:.0f}" for steps in medians)
        print(f"| {workload} | {unlike:g} | {cells} | {statistics.median(targets):.3g} | {noticed} of {len(by_seed)} seeds |")


if __name__ == "__main__":
    table() if sys.argv[1:] == ["table"] else main()
