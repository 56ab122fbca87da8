"""How much slower is what the tuner recommends than the best of 48 strategies, all of which ran? The testbed, emulated compute.

As root, from the repository's root, with nothing else running (about 55 minutes): ``python reports/tuner/real_regret.py``. Writes
``real_regret.json`` and prints README.md's table. ``--quick FILE`` checks in minutes that all of it runs.

Three clusters. On each ``fleetbench tune`` runs, ``TUNINGS`` times, knowing what its file declares and nothing that was measured here. Then
every strategy of its space runs three times (A B ... Z, Z ... B A, A B ... Z), in one launch each. Strategies that a simulation cannot tell
apart count once. The five fastest, the default, and all that were recommended run again, in turns, in fresh launches: the regret is that of
these legs, so that luck in the first three makes no strategy the best of 48.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fleetbench.experiment import Experiment
from fleetbench.result import step_s_of
from fleetbench.store import commit, machine, versions
from fleetbench.strategy import DistributedStrategy
from real.job.session import Session
from real.leg import Leg
from tuner.recommendation import Recommendation
from tuner.space import Equivalence, search_space

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STRATEGIES, ROUNDS, TUNINGS, BEST, FRESH = 48, 3, 1, 5, 4
STEPS, WARM_UP = 8, 2
ALIKE = [{"name": "block", "params": 60_000, "forward": "1.2 ms", "backward": "2.4 ms", "repeat": 20}]
TAPERED = [
    {"name": "stem", "params": 4_000, "forward": "3 ms", "backward": "6 ms", "repeat": 3},
    {"name": "body", "params": 40_000, "forward": "2 ms", "backward": "4 ms", "repeat": 8},
    {"name": "head", "params": 900_000, "forward": "1 ms", "backward": "2 ms"},
]
FRONT = [
    {"name": "embedding", "params": 700_000, "forward": "0.5 ms", "backward": "1 ms"},
    {"name": "narrow", "params": 10_000, "forward": "1 ms", "backward": "2 ms", "repeat": 10},
    {"name": "wide", "params": 90_000, "forward": "2 ms", "backward": "4 ms", "repeat": 5},
]
JITTER = [{"kind": "jitter", "distribution": "gamma", "mean": 0.1, "cv": 0.5}]
SIZES = [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 32.0]
LOOPBACK = {"bandwidth": "25 Gbit/s", "latency": "20 us"}
"""As the error of a file without it advises."""
CLUSTERS: dict[str, dict[str, Any]] = {
    "4 x 1, 400 Mbit/s": {"nodes": 4, "inter": {"bandwidth": "400 Mbit/s"}, "layers": ALIKE},
    "2 x 2, 600 Mbit/s": {
        "nodes": 2,
        "trainers_per_node": 2,
        "inter": {"bandwidth": "600 Mbit/s"},
        "intra": LOOPBACK,
        "layers": TAPERED,
        "update_by_bucket": [False],
    },
    "4 x 1, 250 Mbit/s, 1 ms, stragglers": {
        "nodes": 4,
        "inter": {"bandwidth": "250 Mbit/s", "latency": "1 ms"},
        "stragglers": JITTER,
        "layers": FRONT,
    },
}
Times = dict[DistributedStrategy, list[float]]


def experiment_of(name: str, seed: int) -> Experiment:
    """As a user would write it; ``[tune]`` bounds the space, which is still too large."""
    cluster = {"trainers_per_node": 1, **CLUSTERS[name]}
    updates = cluster.pop("update_by_bucket", [False, True])
    return Experiment.from_dict(
        {
            "name": "real_regret",
            "workload": {"model": "layers", "layers": cluster.pop("layers"), "steps": STEPS},
            "cluster": cluster,
            "run": {"launcher": "testbed", "device": "emulated", "warmup_steps": WARM_UP, "seed": seed},
            "tune": {"fuse_grad_size_in_MB": SIZES, "leg_steps": STEPS, "thread_num": [1], "update_by_bucket": updates},
        }
    )


def strategies_of(experiment: Experiment) -> list[DistributedStrategy]:
    """Of the tuner's space those with different plans, the default first; more than 48 are thinned evenly."""
    same, space = Equivalence(experiment), search_space(experiment)
    different: dict[str, DistributedStrategy] = {}
    for strategy in (experiment.strategy, *map(space.strategy, space.points())):
        different.setdefault(same.key(strategy), strategy)
    first, *others = different.values()
    return [first, *(others[number * len(others) // (STRATEGIES - 1)] for number in range(min(STRATEGIES - 1, len(others))))]


def timed(experiment: Experiment, strategies: Sequence[DistributedStrategy], rounds: int) -> tuple[Times, float]:
    """Seconds of a step, one a round, each in another order and launch; and the seconds that all took. Void legs run once more."""
    begin = time.monotonic()
    found: Times = {strategy: [] for strategy in strategies}
    for number in range(rounds):
        with Session(experiment) as session:
            for strategy in strategies if number % 2 == 0 else strategies[::-1]:
                leg = Leg(strategy=strategy, steps=STEPS, warmup_steps=WARM_UP, window=number)
                results = [session.run(leg)]
                if not (results[0].summary.testbed or {})["counts"]:
                    results.append(session.run(leg))
                found[strategy].append(step_s_of(results[-1]))
    return found, time.monotonic() - begin


def tuned(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """A tuning as a user starts it."""
    experiment.save(folder / "e.toml")
    begin = time.monotonic()
    command = [sys.executable, "-P", "-m", "fleetbench", "tune", "e.toml", "--json", "--out", "runs"]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    seconds = time.monotonic() - begin
    (path,) = (folder / "runs").glob("*-tune-*")
    told = Recommendation.load(path)
    return {"seconds": seconds, "line": told.line, "strategy": told.strategy, "legs": sum(len(arm.measured_runs) for arm in told.arms)}


def measured(name: str, *, quick: bool) -> dict[str, Any]:
    """A cluster: its tunings, all strategies, and the fresh legs."""
    experiment = experiment_of(name, 0)
    strategies = strategies_of(experiment)[: 4 if quick else STRATEGIES]
    tunings = []
    for seed in range(1 if quick else TUNINGS):
        with tempfile.TemporaryDirectory() as folder:
            tunings.append(tuned(experiment_of(name, seed), Path(folder)))
        print(name, tunings[-1]["line"], f"{tunings[-1]['seconds']:.0f} s", flush=True)
    found, seconds = timed(experiment, strategies, 1 if quick else ROUNDS)
    best = sorted(found, key=lambda strategy: fmean(found[strategy]))[:BEST]
    again = list(dict.fromkeys([experiment.strategy, *best, *(one["strategy"] for one in tunings)]))
    fresh, _ = timed(experiment, again, 1 if quick else FRESH)
    means = {strategy: fmean(times) for strategy, times in fresh.items()}
    fastest = min(means.values())
    for one in tunings:
        one["regret"] = means[one["strategy"]] / fastest - 1
        one["strategy"] = one["strategy"].changes()
    return {
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine(),
        "versions": versions(),
        "cluster": name,
        "strategies": len(strategies),
        "seconds": seconds,
        "default_regret": means[experiment.strategy] / fastest - 1,
        "tunings": tunings,
        "all": [{"strategy": strategy.changes(), "step_s": times} for strategy, times in found.items()],
        "fresh": [{"strategy": strategy.changes(), "step_s": times} for strategy, times in fresh.items()],
    }


def row(entry: dict[str, Any]) -> str:
    """A row of README.md's table."""
    regrets = ", ".join(f"{100 * one['regret']:.1f}" for one in entry["tunings"])
    seconds = ", ".join(f"{one['seconds']:.0f}" for one in entry["tunings"])
    share = ", ".join(f"{one['seconds'] / entry['seconds']:.2f}" for one in entry["tunings"])
    head = f"| {entry['cluster']} | {entry['strategies']} | {entry['seconds']:.0f} | {100 * entry['default_regret']:.1f}"
    return f"{head} | {regrets} | {seconds} | {share} |"


def main() -> None:
    """All clusters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", type=Path, metavar="FILE")
    quick = parser.parse_args().quick
    raw = quick or HERE / "real_regret.json"
    entries = []
    for name in CLUSTERS:
        entries.append(measured(name, quick=quick is not None))
        raw.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        print(row(entries[-1]), flush=True)
    regrets = [one["regret"] for entry in entries for one in entry["tunings"]]
    print(f"median {100 * median(regrets):.1f} %, worst {100 * max(regrets):.1f} %")


if __name__ == "__main__":
    main()
