"""Two scenarios of the time to a target, repeated for real: the tuner that asks virtual trainers, and the one that does not.

As root, from the repository's root, with nothing else running (about 15 minutes):
``python reports/tuner/targets_real.py [NAME ...]``. Writes ``targets_real.json`` and prints README.md's table.
``--print`` prints it from the file.

Two hosts of the testbed with a trainer each, which train a perceptron on a noisy teacher's labels, four fifths of a
trainer's samples from few classes. Both tuners run whole, with real legs and real runs to the target, under the same
budget. Then the default and what either recommends run again: to the target, with seeds that no tuner has seen, and
for the seconds of a step in turns (A B C, C B A, ...).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleetbench.experiment import Experiment
from fleetbench.result import step_s_of
from fleetbench.store import commit, machine, versions
from fleetbench.strategy import DistributedStrategy
from real.job.session import Session
from real.leg import Leg
from sim.learning.virtual_training import train
from sim.run import simulate
from tuner.space import name_of
from tuner.tune import tune

HERE = Path(__file__).parent
RAW = HERE / "targets_real.json"
LINKS = {"far": {"bandwidth": "50 Mbit/s", "latency": "2 ms"}, "near": {"bandwidth": "400 Mbit/s", "latency": "0.5 ms"}}
PILOT, FRESH, ROUNDS = 100, range(50, 55), 4
STEPS = 48


def experiment_of(name: str) -> Experiment:
    """As a user would write it; the target is what K = 4, under a seed of its own, is at after half of the steps."""
    workload: dict[str, Any] = {
        "model": "mlp",
        "model_options": {"hidden": 256, "depth": 2},
        "data": "synthetic",
        "data_options": {"samples": 20_000, "teacher": 32, "noise": 0.2},
        "unlike_data": 0.8,
        "batch_size": 256,
        "lr": 0.15,
        "steps": 300,
        "eval_every": 8,
    }
    own = Experiment.from_dict(
        {
            "name": name,
            "workload": workload,
            "cluster": {"nodes": 2, "trainers_per_node": 1, "inter": LINKS[name]},
            "tune": {"thread_num": [1], "wire": ["fp32"], "budget_minutes": 3.0, "leg_steps": STEPS, "finalists": 2},
            "run": {"launcher": "testbed", "device": "cpu", "seed": PILOT},
            "strategy": {"localsgd": True, "localsgd_configs": {"k_steps": 4}},
        }
    )
    target = round(min(loss for step, loss in train(own).held_out if step <= workload["steps"] / 2), 3)
    workload_with = dataclasses.replace(own.workload, target_loss=target)
    return own.replace(workload=workload_with, strategy=DistributedStrategy(), run=dataclasses.replace(own.run, seed=0))


def priced(experiment: Experiment, strategies: dict[str, DistributedStrategy]) -> dict[str, Any]:
    """Steps to the target of each with the fresh seeds, seconds of a step in turns, and the median time to the target."""
    steps: dict[str, list[float | None]] = {name: [] for name in strategies}
    step_s: dict[str, list[float]] = {name: [] for name in strategies}
    with Session(experiment) as session:
        for seed in FRESH:
            for name, strategy in strategies.items():
                leg = Leg(
                    strategy=strategy, steps=experiment.workload.steps, start="initial", evaluate=True, ends_at_target=True, seed=seed
                )
                steps[name].append(session.run(leg).summary.steps_to_target)
        for number in range(ROUNDS):
            order = [*strategies.items()]
            for name, strategy in order if number % 2 == 0 else order[::-1]:
                step_s[name].append(step_s_of(session.run(Leg(strategy=strategy, window=number, steps=STEPS))))
    known = {name: [float("inf") if one is None else one for one in own] for name, own in steps.items()}
    target_s = {name: statistics.median(known[name]) * statistics.median(step_s[name]) for name in strategies}
    return {"steps": steps, "step_s": step_s, "target_s": target_s}


def scenario(name: str) -> dict[str, Any]:
    """Both tunings, and what they recommend, priced."""
    experiment, found = experiment_of(name), dict[str, Any]()
    strategies = {"default": DistributedStrategy()}
    with tempfile.TemporaryDirectory() as folder:
        for tuner in ("now", "before"):
            begin = time.monotonic()
            said, _ = tune(experiment, out=Path(folder) / tuner, simulate=simulate if tuner == "before" else None)
            strategies[tuner] = said.strategy
            found[tuner] = {"line": said.line, "way": name_of(said.strategy), "tune_s": time.monotonic() - begin, "notes": said.notes}
    return {"name": name, "target": experiment.workload.target_loss, **found, **priced(experiment, strategies)}


def show(rows: list[dict[str, Any]]) -> None:
    """The table of README.md."""
    print("| link | target | before | now | time to the target: default | before | now | now over before | over default |")
    print("|" + "---|" * 9)
    for row in rows:
        default, before, now = (row["target_s"][name] for name in ("default", "before", "now"))
        link = ", ".join(LINKS[row["name"]].values())
        cells = (link, f"{row['target']}", row["before"]["way"], row["now"]["way"], *(f"{one:.2f} s" for one in (default, before, now)))
        print(f"| {' | '.join(cells)} | {before / now:.2f}x | {default / now:.2f}x |")


def main(names: list[str]) -> None:
    """Run the scenarios, or print what is there."""
    if names == ["--print"]:
        show(json.loads(RAW.read_text(encoding="utf-8"))["rows"])
        return
    rows = [scenario(name) for name in names or LINKS]
    head = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine(), "versions": versions()}
    RAW.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    show(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
