"""Do virtual trainers show what is known of local steps and of stale gradients? Paired over sixteen seeds, with one-sided sign tests.

    python reports/virtual_trainers/known_results.py local      # sweeps learning rates on two other seeds, then trains; known_results.jsonl
    python reports/virtual_trainers/known_results.py servers    # the same for parameter servers
    python reports/virtual_trainers/known_results.py tables     # the tables of README.md from the last run of each part

Eight trainers of a perceptron on the labels of a random teacher, a fifth of which are drawn at random; of a trainer's samples 80 % come
from few of the classes, but where the data are said to be alike. Seconds are simulated: a step computes 3 ms, and links carry 10 Mbit/s
(slow) or 10 Gbit/s (fast).

A strategy's learning rate is chosen on two seeds that are not among the sixteen, for each claim by what the claim is about: the lowest
median of the held-out loss in the end, or of the seconds to the target on that link. With parameter servers the low rate is the lowest of
all, and the high rate the highest at which synchronous servers end below the target on both of those seeds, with like data. An
asynchronous push is one trainer's, so that an eighth of a synchronous rate changes as much.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
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
RATES = (0.1, 0.2, 0.4, 0.8)
SERVER_RATES = (*RATES, 1.6, 3.2)
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
}


SERVED: dict[str, dict[str, Any]] = {
    "synchronous servers": {"mode": "ps", "a_sync": False},
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
            "lr": lr / TRAINERS if strategy == "asynchronous" else lr,
            "target_loss": TARGET,
        },
        "cluster": {
            "nodes": TRAINERS,
            "trainers_per_node": 1,
            "servers": int(strategy in SERVED),
            "inter": {"bandwidth": LINKS[link], "latency": "50 us"},
        },
        "strategy": (STRATEGIES | SERVED)[strategy],
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
    """Losses, and simulated seconds to the target on both links; none where it is not reached. ``lr``: of eight trainers' gradients."""
    row: dict[str, Any] = {"strategy": strategy, "seed": seed, "lr": lr, "unlike": unlike}
    learnt = None
    for link in LINKS:
        own = experiment(strategy, seed, lr, unlike, link, folder)
        if learnt is None or strategy == "asynchronous":
            learnt = train(own)
        row[link] = simulate(own, learnt=learnt).summary.time_to_target_s
        row["loss" if link == "slow" else "loss_fast"] = learnt.final_loss
    return row


def local_steps(folder: Path) -> Iterator[dict[str, Any]]:
    """Rates first, then the sixteen seeds at those that are chosen."""
    for strategy in STRATEGIES:
        swept = [{"what": "rate", **trained(strategy, seed, lr, UNLIKE, folder)} for lr in RATES for seed in OTHERS]
        yield from swept
        by_field = {field: chosen(swept, strategy, field) for field in ("loss", *LINKS)}
        print(strategy, by_field, flush=True)
        for seed in SEEDS:
            for lr in sorted(set(by_field.values())):
                yield {"what": "seed", **trained(strategy, seed, lr, UNLIKE, folder)}
            yield {"what": "seed", **trained(strategy, seed, by_field["loss"], 0.0, folder)}


def servers(folder: Path) -> Iterator[dict[str, Any]]:
    """The high rate first, then the sixteen seeds at both rates."""
    swept = [{"what": "rate", **trained("synchronous servers", seed, lr, 0.0, folder)} for lr in SERVER_RATES for seed in OTHERS]
    yield from swept
    print("low and high rate", both_rates(swept), flush=True)
    for seed in SEEDS:
        for strategy in SERVED:
            for lr in both_rates(swept):
                for unlike in (0.0, UNLIKE):
                    yield {"what": "seed", **trained(strategy, seed, lr, unlike, folder)}


PARTS = {"local": local_steps, "servers": servers}


def finite(value: float | None) -> float:
    """Of a loss, or of seconds to a target: a large number where it was not reached, or training diverged."""
    return value if value is not None and math.isfinite(value) else math.inf


def chosen(rows: list[dict[str, Any]], strategy: str, field: str) -> float:
    """The rate with the lowest median of ``field`` over the seeds that rates are chosen on; of equal ones the lowest."""
    swept = [row for row in rows if (row["what"], row["strategy"]) == ("rate", strategy)]
    return min(RATES, key=lambda lr: statistics.median(finite(row[field]) for row in swept if row["lr"] == lr))


def both_rates(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """The low and the high rate of parameter servers."""
    swept = [row for row in rows if row["what"] == "rate"]
    stays = [lr for lr in SERVER_RATES if all(finite(row["loss"]) < TARGET for row in swept if row["lr"] == lr)]
    return SERVER_RATES[0], max(stays)


def run(part: str) -> None:
    """Every training is a row, which names its part and its commit."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    source = {"part": part, "commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as name:
        for row in PARTS[part](Path(name)):
            with RAW.open("a", encoding="utf-8") as raw:
                raw.write(json.dumps({**source, **row}) + "\n")


def current(part: str) -> list[dict[str, Any]]:
    """The rows of a part's last run; those that name no part are of an earlier script, which chose all rates by the loss in the end."""
    rows = [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()]
    own = [row for row in rows if row.get("part") == part]
    return [row for row in own if row["commit"] == own[-1]["commit"]]


def of_seeds(rows: list[dict[str, Any]], strategy: str, field: str, unlike: float, lr: float) -> list[float]:
    """A field of a strategy's sixteen trainings, in the order of their seeds."""
    own = [row for row in rows if (row["what"], row["strategy"], row["unlike"], row["lr"]) == ("seed", strategy, unlike, lr)]
    return [finite(row[field]) for row in sorted(own, key=lambda row: row["seed"])]


def excess(losses: list[float], others: list[float]) -> list[float]:
    """By how much each is above the other of its seed."""
    return [one - other for one, other in zip(losses, others, strict=True)]


def tables() -> None:
    """Both tables."""
    rows = current("local")

    def of(strategy: str, field: str, unlike: float = UNLIKE) -> list[float]:
        return of_seeds(rows, strategy, field, unlike, chosen(rows, strategy, field))

    for strategy in STRATEGIES:
        print(f"{strategy}: rates {', '.join(f'{chosen(rows, strategy, field):g} by {field}' for field in ('loss', *LINKS))}")

    def lost(strategy: str, unlike: float) -> list[float]:
        return excess(of(strategy, "loss", unlike), of("synchronous", "loss", unlike))

    table(
        {
            "slow network: K = 16 reaches the target sooner than synchronous training": (of("K = 16", "slow"), of("synchronous", "slow")),
            "fast network: synchronous training reaches it sooner than K = 16": (of("synchronous", "fast"), of("K = 16", "fast")),
            "slow network: adaptive K sooner than synchronous training": (of("adaptive K", "slow"), of("synchronous", "slow")),
            "slow network: K = 16 sooner than adaptive K": (of("K = 16", "slow"), of("adaptive K", "slow")),
            "fast network: adaptive K sooner than K = 16": (of("adaptive K", "fast"), of("K = 16", "fast")),
            "fast network: synchronous training sooner than adaptive K": (of("synchronous", "fast"), of("adaptive K", "fast")),
            "post-local SGD ends lower than Local SGD from the start": (of("K = 16 after 480 steps", "loss"), of("K = 16", "loss")),
            "an outer optimizer ends lower than plain averaging at K = 64": (of("K = 64, outer", "loss"), of("K = 64", "loss")),
            **{
                f"unlike data: {strategy} loses more to synchronous training than with like data": (
                    lost(strategy, 0.0),
                    lost(strategy, UNLIKE),
                )
                for strategy in STRATEGIES
                if strategy != "synchronous"
            },
        }
    )
    rows = current("servers")
    low, high = both_rates(rows)
    print(f"servers: low rate {low:g}, high rate {high:g}")
    claims = {}
    for link, field in (("slow", "loss"), ("fast", "loss_fast")):

        def stale(unlike: float, lr: float, field: str = field) -> tuple[list[float], list[float]]:
            return of_seeds(rows, "synchronous servers", field, unlike, lr), of_seeds(rows, "asynchronous", field, unlike, lr)

        for kind, unlike in (("like", 0.0), ("unlike", UNLIKE)):
            claims[f"{link} network, {kind} data, high rate: asynchronous ends higher than synchronous"] = stale(unlike, high)
            claims[f"{link} network, {kind} data, low rate: it ends higher, too (expected not to hold)"] = stale(unlike, low)
            losses = {lr: excess(*reversed(stale(unlike, lr))) for lr in (low, high)}
            claims[f"{link} network, {kind} data: it loses more at the high rate than at the low one"] = losses[low], losses[high]
        for name, lr in (("low", low), ("high", high)):
            both = [excess(*reversed(stale(unlike, lr))) for unlike in (0.0, UNLIKE)]
            claims[f"{link} network, {name} rate: it loses more with unlike data than with like data"] = both[0], both[1]
    table(claims)


def table(claims: dict[str, tuple[list[float], list[float]]]) -> None:
    """Wins of sixteen for every claim, and the sign test's one-sided p."""
    print("| claim | seeds of 16 | one-sided p | medians |\n|---|---|---|---|")
    for claim, (lower, higher) in claims.items():
        wins = sum(one < other for one, other in zip(lower, higher, strict=True))
        p = binomtest(wins, len(lower), alternative="greater").pvalue
        print(f"| {claim} | {wins} | {p:.2g} | {statistics.median(lower):.4g} against {statistics.median(higher):.4g} |")


if __name__ == "__main__":
    tables() if sys.argv[1] == "tables" else run(sys.argv[1])
