"""Do virtual trainers show what is known of local steps? Paired over sixteen seeds, with one-sided sign tests.

    python reports/virtual_trainers/known_results.py            # sweeps learning rates on other seeds, then trains; known_results.jsonl
    python reports/virtual_trainers/known_results.py tables     # the tables of README.md from the rows

Eight trainers of a perceptron on the labels of a random teacher, a fifth of which are drawn at random; of a trainer's samples 80 % come
from few of the classes, but where the data are said to be alike. Every strategy has the learning rate, of three, with the lowest median
held-out loss over two seeds that are not among the sixteen. An asynchronous push is one trainer's, so that an eighth of a synchronous
rate changes as much. Seconds are simulated: a step computes 3 ms, and links carry 10 Mbit/s (slow) or 10 Gbit/s (fast).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest

from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key
from fleetbench.quantities import Nanoseconds
from fleetbench.store import commit
from sim.learning.virtual_training import train
from sim.run import simulate

RAW = Path(__file__).with_name("known_results.jsonl")
TRAINERS, STEPS = 8, 960
SEEDS, OTHERS = range(16), range(100, 102)
RATES = (0.1, 0.2, 0.4)
UNLIKE = 0.8
TARGET = 1.6
LINKS = {"slow": "10 Mbit/s", "fast": "10 Gbit/s"}


def local(k_steps: int, **configs: Any) -> dict[str, Any]:
    """Local SGD."""
    return {"localsgd": True, "localsgd_configs": {"k_steps": k_steps, **configs}}


STRATEGIES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "K = 16": local(16),
    "K = 16 after 480 steps": local(16, begin_step=480),
    "adaptive K": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 16}},
    "K = 64": local(64),
    "K = 64, outer": local(64, outer_lr=0.7, outer_momentum=0.6, outer_nesterov=True),
    "asynchronous": {"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 0}},
}


def experiment(strategy: str, seed: int, lr: float, unlike: float, link: str, folder: Path) -> Experiment:
    """One training."""
    data = {
        "workload": {
            "model": "mlp",
            "model_options": {"hidden": 32, "depth": 1},
            "data": "synthetic",
            "data_options": {"samples": 20_000, "teacher": 32, "noise": 0.2},
            "unlike_data": unlike,
            "batch_size": 8,
            "steps": STEPS,
            "eval_every": 16,
            "lr": lr,
            "target_loss": TARGET,
        },
        "cluster": {
            "nodes": TRAINERS,
            "trainers_per_node": 1,
            "servers": int(strategy == "asynchronous"),
            "inter": {"bandwidth": LINKS[link], "latency": "50 us"},
        },
        "strategy": STRATEGIES[strategy],
        "run": {"seed": seed, "warmup_steps": 0},
    }
    found = Experiment.from_dict(data)
    numels = ((1, 32 * 32 + 32), (3, 32 * 10 + 10))
    gradients = [Gradient(name=f"{place}.weight", numel=numel, ready=Nanoseconds(1_000_000)) for place, numel in numels]
    layers = tuple(
        Layer(name=gradient.name, gradients=(gradient,), forward=Nanoseconds(500_000), backward=Nanoseconds(1_000_000))
        for gradient in gradients
    )
    path = folder / f"{compute_key(found)}.toml".replace("/", "-")
    Profile(machine="declared", created="never", tables=(LayerTable(key=compute_key(found), layers=layers),)).save(path)
    return Experiment.from_dict({**data, "workload": {**data["workload"], "profile": str(path)}})


def trained(strategy: str, seed: int, lr: float, unlike: float, folder: Path) -> dict[str, Any]:
    """Losses, and simulated seconds to the target on both links; none where it is not reached."""
    row: dict[str, Any] = {"strategy": strategy, "seed": seed, "lr": lr, "unlike": unlike}
    learnt = None
    for link in LINKS:
        own = experiment(strategy, seed, lr, unlike, link, folder)
        if learnt is None or strategy == "asynchronous":
            learnt = train(own)
        row[link] = simulate(own, learnt=learnt).summary.time_to_target_s
        row["loss" if link == "slow" else "loss_fast"] = learnt.final_loss
    return row


def main() -> None:
    """Rates first, then the sixteen seeds; every training is a row."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with RAW.open("w", encoding="utf-8") as raw, tempfile.TemporaryDirectory() as name:
        raw.write(json.dumps({"commit": commit(), "torch": torch.__version__}) + "\n")

        def keep(row: dict[str, Any], what: str) -> dict[str, Any]:
            raw.write(json.dumps({"what": what, **row}) + "\n")
            raw.flush()
            return row

        for strategy in STRATEGIES:
            rates = [rate / (TRAINERS if strategy == "asynchronous" else 1) for rate in RATES]
            losses = {
                lr: statistics.median(keep(trained(strategy, seed, lr, UNLIKE, Path(name)), "rate")["loss"] for seed in OTHERS)
                for lr in rates
            }
            best = min(losses, key=lambda lr: losses[lr])
            print(strategy, {lr: round(loss, 3) for lr, loss in losses.items()}, flush=True)
            for seed in SEEDS:
                for unlike in (0.0, UNLIKE):
                    keep(trained(strategy, seed, best, unlike, Path(name)), "seed")
                if strategy in ("asynchronous", "synchronous"):
                    for lr in (rates[0], rates[-1]):
                        keep(trained(strategy, seed, lr, 0.0, Path(name)), "stale")
    tables()


def tables() -> None:
    """Wins of sixteen for every claim, and the sign test's one-sided p."""
    rows = [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()[1:]]

    def of(strategy: str, field: str, unlike: float = UNLIKE, rate: int | None = None) -> list[float]:
        own = [row for row in rows if (row["strategy"], row["unlike"]) == (strategy, unlike)]
        own = [row for row in own if row["what"] == ("seed" if rate is None else "stale")]
        if own and rate is not None:
            lr = sorted({row["lr"] for row in own})[rate]
            own = [row for row in own if row["lr"] == lr]
        return [float("inf") if row[field] is None else row[field] for row in sorted(own, key=lambda row: row["seed"])]

    def excess(strategy: str, unlike: float, rate: int | None = None) -> list[float]:
        pairs = zip(of(strategy, "loss", unlike, rate), of("synchronous", "loss", unlike, rate), strict=False)
        return [one - other for one, other in pairs]

    claims = {
        "slow network: K = 16 reaches the target sooner than synchronous training": (of("K = 16", "slow"), of("synchronous", "slow")),
        "fast network: synchronous training reaches it sooner than K = 16": (of("synchronous", "fast"), of("K = 16", "fast")),
        "slow network: adaptive K sooner than synchronous training": (of("adaptive K", "slow"), of("synchronous", "slow")),
        "slow network: K = 16 sooner than adaptive K": (of("K = 16", "slow"), of("adaptive K", "slow")),
        "fast network: adaptive K sooner than K = 16": (of("adaptive K", "fast"), of("K = 16", "fast")),
        "fast network: synchronous training sooner than adaptive K": (of("synchronous", "fast"), of("adaptive K", "fast")),
        "post-local SGD ends lower than Local SGD from the start": (of("K = 16 after 480 steps", "loss"), of("K = 16", "loss")),
        "an outer optimizer ends lower than plain averaging at K = 64": (of("K = 64, outer", "loss"), of("K = 64", "loss")),
        "like data: asynchronous training loses more to synchronous training at the highest rate than at the lowest": (
            excess("asynchronous", 0.0, 0),
            excess("asynchronous", 0.0, -1),
        ),
        **{
            f"unlike data: {strategy} loses more to synchronous training than with like data": (
                excess(strategy, 0.0),
                excess(strategy, UNLIKE),
            )
            for strategy in STRATEGIES
            if strategy != "synchronous"
        },
    }
    print("| claim | seeds of 16 | one-sided p | medians |\n|---|---|---|---|")
    for claim, (lower, higher) in claims.items():
        if min(len(lower), len(higher)) < len(SEEDS):
            print(f"| {claim} | not trained | | |")
            continue
        wins = sum(one < other for one, other in zip(lower, higher, strict=True))
        p = binomtest(wins, len(lower), alternative="greater").pvalue
        print(f"| {claim} | {wins} | {p:.2g} | {statistics.median(lower):.4g} against {statistics.median(higher):.4g} |")


if __name__ == "__main__":
    tables() if sys.argv[1:] == ["tables"] else main()
