"""Tune planted truths again and again: one much faster, one where nothing gains, and gains of exactly 0, 2, 5 and 10 %.

Run from the repository's root: ``python reports/planted_truths/measure.py [ROUNDS] [SMALL_ROUNDS]``. Writes ``raw.json``
(every verdict with its pairs) and prints the rows of README.md. Each round takes its own profile.

A small gain g is planted by stragglers in which the two trainers are late in turns, by d = 2g / (1 - g) of a step's compute: meeting
after every step they take 1 + d, meeting after every second 1 + d / 2, and (1 + d) / (1 + d / 2) = 1 + g. What a step takes beside
its compute (the exchange of 3 kB) dilutes the gain, which is therefore a ceiling.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleetbench import DistributedStrategy, Experiment, tune
from fleetbench.config import encode
from fleetbench.store import machine, versions
from real.job.session import Session
from tuner.real_runs import RealRuns
from tuner.recommendation import Pair
from tuner.sequential import Speedup, paired_speedup
from tuner.verify import measured_pairs

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
EXPECTED = {"planted_gain": "USE", "planted_none": "KEEP DEFAULT"}
GAINS = (0.0, 0.02, 0.05, 0.10)
SMALL = """schema = 1
name = "NAME"

[workload]
model = "digits_cnn"
model_options = { channels = 8, hidden = 16 }
data = "synthetic"
batch_size = 2000
steps = 30
optimizer = "sgd"
lr = 0.1
target_loss = 100.0  # any training reaches it at its third evaluation: only time tells two strategies apart
eval_every = 10

[cluster]
nodes = 1
trainers_per_node = 2

[[cluster.stragglers]]
kind = "blocks"  # one block holds the whole run
values = [[LATE, 0.0], [0.0, LATE]]
block_steps = 10_000

[tune]
trials = 10
finalists = 2
leg_steps = 20
local_steps = [1, 2]
fuse_grad_size_in_MB = [32]
nccl_comm_num = [1]
thread_num = [1]
"""


def small_gain(gain: float, folder: Path) -> Path:
    """An experiment in which two local steps gain so much of the compute, or nothing does; written to ``folder``."""
    late = 2 * gain / (1 - gain)
    path = folder / "experiment.toml"
    path.write_text(SMALL.replace("NAME", f"planted_{100 * gain:.0f}_percent").replace("LATE", str(late)), encoding="utf-8")
    return path


def one_round(name: str, path: Path, seed: int) -> dict[str, Any]:
    """Tune one experiment from nothing; where a planted example says USE, measure that again in a launch of its own."""
    experiment = Experiment.load(path, [f"run.seed={seed}"])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        recommendation, tuning = tune(experiment, out=Path(folder))
        tuned = Experiment.load(tuning / "experiment.toml")
        found = {
            "example": name,
            "seed": seed,
            "verdict": recommendation.verdict,
            "line": recommendation.line,
            "notes": list(recommendation.notes),
            "speedup": [recommendation.speedup, recommendation.low, recommendation.high],
            "strategy": recommendation.strategy.changes(),
            "pairs": encode(recommendation.pairs),
            "arms": [{"name": arm.name, "simulated_s": arm.simulated_s, "measured_s": arm.measured_s} for arm in recommendation.arms],
            "tune_s": time.monotonic() - begin,
        }
        if recommendation.verdict == "USE" and name in EXPECTED:
            again, pairs = remeasure(tuned, recommendation.strategy)
            found |= {"again": [again.mean, again.low, again.high], "again_pairs": encode(pairs)}
            found["overlaps"] = bool(again.low <= (recommendation.high or 0) and (recommendation.low or 0) <= again.high)
    return found


def remeasure(experiment: Experiment, strategy: DistributedStrategy) -> tuple[Speedup, list[Pair]]:
    """Measure a recommendation again in a launch of its own."""
    experiment = experiment.replace(tune=dataclasses.replace(experiment.tune, pairs=6))
    with tempfile.TemporaryDirectory() as folder, Session(experiment) as session:
        legs = RealRuns(experiment=experiment, runner=session, folder=Path(folder), step_s=0.0)
        pairs = measured_pairs(experiment, strategy, legs)
    return paired_speedup([pair.default_s for pair in pairs], [pair.finalist_s for pair in pairs]), pairs


def main(rounds: int, small_rounds: int) -> None:
    """Take the experiments in turns, and keep what is done after every round."""
    started = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    done: list[dict[str, Any]] = []

    def keep(found: dict[str, Any]) -> None:
        done.append(found)
        speedup = [figure and round(figure, 3) for figure in found["speedup"]]
        print(f"| {found['example']} | {found['seed']} | {found['verdict']} | {speedup} | {found.get('again', '')} |", flush=True)
        data = {"started": started, "machine": machine(), "versions": versions(), "rounds": done}
        (HERE / "raw.json").write_text(json.dumps(data, indent=1), encoding="utf-8")

    for seed in range(max(rounds, small_rounds)):
        if seed < small_rounds:
            for gain in GAINS:
                with tempfile.TemporaryDirectory() as folder:
                    keep(one_round(f"gain {100 * gain:.0f} %", small_gain(gain, Path(folder)), seed))
        if seed < rounds:
            for name in EXPECTED:
                keep(one_round(name, EXAMPLES / f"{name}.toml", seed))


if __name__ == "__main__":
    main(*(int(argument) for argument in (*sys.argv[1:], *("10", "5")[len(sys.argv) - 1 :])))
