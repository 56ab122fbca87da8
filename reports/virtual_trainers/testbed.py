"""Time to a target on the testbed: predicted by virtual trainers and the simulated clock, sealed, then measured by real runs.

    python reports/virtual_trainers/testbed.py predict    # profiles, and writes testbed_profile/ and testbed_predictions.json
    python reports/virtual_trainers/testbed.py measure    # as root, on a quiet machine; appends to testbed.jsonl
    python reports/virtual_trainers/testbed.py table      # the table of README.md

Two hosts with a trainer each, which compute for real, on a link of 50 Mbit/s and 2 ms. Every row is what a user's three commands say:
``fleetbench profile`` once, ``fleetbench sim --loss`` of its ``measured.toml``, and ``fleetbench real`` of the file itself. The target is
chosen on a seed that is not measured. The profile is taken on this testbed, again where it does not count. No run to the target is looked
at before the predictions are written; each measured line names their digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.store import commit
from sim.learning.virtual_training import train

HERE = Path(__file__).parent
PROFILED, PREDICTIONS, RAW = (HERE / f"testbed{name}" for name in ("_profile", "_predictions.json", ".jsonl"))
MEASURED = PROFILED / "measured.toml"
SEEDS, PILOT = (10, 11, 12, 13, 14), 100
LOCAL = {"strategy.localsgd": "true"}
STRATEGIES: dict[str, dict[str, str]] = {
    "synchronous": {},
    "K = 4": LOCAL | {"strategy.localsgd_configs.k_steps": "4"},
    "K = 16": LOCAL | {"strategy.localsgd_configs.k_steps": "16"},
    "K = 16, outer optimizer": LOCAL
    | {
        "strategy.localsgd_configs.k_steps": "16",
        "strategy.localsgd_configs.outer_lr": "0.7",
        "strategy.localsgd_configs.outer_momentum": "0.9",
    },
    "adaptive K": {"strategy.adaptive_localsgd": "true", "strategy.adaptive_localsgd_configs.init_k_steps": "4"},
    "GeoSGD, K = 8": {
        "strategy.mode": "ps",
        "strategy.a_sync": "true",
        "strategy.a_sync_configs.k_steps": "8",
        "cluster.servers": "1",
    },
}
FILE: dict[str, Any] = {
    "name": "far_mlp",
    "workload": {
        "model": "mlp",
        "model_options": {"hidden": 256, "depth": 2},
        "data": "synthetic",
        "data_options": {"samples": 20_000, "teacher": 32, "noise": 0.2},
        "unlike_data": 0.8,
        "batch_size": 256,
        "lr": 0.15,
        "steps": 300,
        "eval_every": 8,
    },
    "cluster": {"nodes": 2, "trainers_per_node": 1, "inter": {"bandwidth": "50 Mbit/s", "latency": "2 ms"}},
    "tune": {"thread_num": [1]},
    "run": {"launcher": "testbed", "device": "cpu"},
}


def fleetbench(*words: object) -> str:
    """What the command prints; its progress goes to this one's stderr. Raises ``CalledProcessError`` where it fails."""
    command = [Path(sys.executable).with_name("fleetbench"), *words]
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def changed(strategy: str, seed: int, target: float) -> list[str]:
    """The changes of the file that make a run of it."""
    values = {**STRATEGIES[strategy], "run.seed": seed, "workload.target_loss": target}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def pilot() -> float:
    """The held-out loss that K = 16, under a seed of its own, is at after half of the steps."""
    own = Experiment.from_dict(
        FILE | {"strategy": {"localsgd": True, "localsgd_configs": {"k_steps": 16}}, "run": FILE["run"] | {"seed": PILOT}}
    )
    losses = dict(train(own).held_out)
    steps = FILE["workload"]["steps"]
    return round(min(loss for step, loss in losses.items() if step <= 0.5 * steps), 3)


def profile_of(path: Path, folder: Path) -> Path:
    """The folder of the first of three profiles of which every leg counts."""
    for number in range(3):
        out = folder / f"profiles{number}"
        fleetbench("profile", path, "--out", out)
        (taken,) = out.iterdir()
        if not any(note.startswith("void") for note in Profile.load(taken / "profile.toml").notes):
            return taken
    raise SystemExit("no profile of three counts: the machine is not quiet")


def predict() -> None:
    """Profile here, choose the target, and write what the simulator says of every cell."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "e.toml"
        Experiment.from_dict(FILE).save(path)
        taken = profile_of(path, folder)
        PROFILED.mkdir(exist_ok=True)
        for file in ("profile.toml", "measured.toml"):
            shutil.copyfile(taken / file, PROFILED / file)
        target, cells = pilot(), []
        for strategy in STRATEGIES:
            for seed in SEEDS:
                said = json.loads(
                    fleetbench("sim", MEASURED, "--loss", "--json", "--out", folder / "runs", *changed(strategy, seed, target))
                )
                cells.append({"strategy": strategy, "seed": seed, **_figures(said)})
    profile = hashlib.sha256((PROFILED / "profile.toml").read_bytes() + MEASURED.read_bytes()).hexdigest()
    text = json.dumps({"commit": commit(), "profile": profile, "target": target, "cells": cells}, indent=1)
    PREDICTIONS.write_text(text + "\n", encoding="utf-8")


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    names = ("time_to_target_s", "steps_to_target", "final_loss")
    return {name: summary[name] for name in names} | {"step_s": summary["wall_s"] / summary["steps"]}


def measure() -> None:
    """The cells that are not there yet, seed by seed; every line is on disk before the next run starts."""
    digest = hashlib.sha256(PREDICTIONS.read_bytes()).hexdigest()
    target = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["target"]
    there = {(line["strategy"], line["seed"]) for line in _lines() if line["predictions"] == digest and line["counts"]}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "e.toml"
        Experiment.from_dict(FILE).save(path)
        for seed in SEEDS:
            for strategy in [*STRATEGIES][:: 1 if seed % 2 else -1]:
                if (strategy, seed) in there:
                    continue
                found = json.loads(fleetbench("real", path, "--json", "--out", Path(name) / "runs", *changed(strategy, seed, target)))
                counts = found["testbed"]["counts"]
                line = {"strategy": strategy, "seed": seed, **_figures(found), "counts": counts, "predictions": digest, "commit": commit()}
                with RAW.open("a", encoding="utf-8") as file:
                    print(json.dumps(line), file=file)
                print(line, flush=True)


def _lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()] if RAW.exists() else []


def table() -> None:
    """Medians over the seeds of predicted and measured, and the error of both factors and their product."""
    sealed, digest = json.loads(PREDICTIONS.read_text(encoding="utf-8")), hashlib.sha256(PREDICTIONS.read_bytes()).hexdigest()
    measured = {(line["strategy"], line["seed"]): line for line in _lines() if line["predictions"] == digest and line["counts"]}
    print("| strategy | seeds | predicted | measured | error of the median | of each seed | of steps | of a step |")
    print("|---|---|---|---|---|---|---|---|")
    for strategy in STRATEGIES:
        cells = [cell for cell in sealed["cells"] if cell["strategy"] == strategy]
        pairs = [(cell, measured[strategy, cell["seed"]]) for cell in cells if (strategy, cell["seed"]) in measured]
        pairs = [(said, found) for said, found in pairs if said["time_to_target_s"] and found["time_to_target_s"]]
        if not pairs:
            print(f"| {strategy} | 0 of {len(cells)} | | | | | | |")
            continue
        said, found = (statistics.median(pair[side]["time_to_target_s"] for pair in pairs) for side in (0, 1))
        errors = {
            name: [math.log(own[name] / real[name]) for own, real in pairs] for name in ("time_to_target_s", "steps_to_target", "step_s")
        }
        each, steps, step = (f"{100 * min(found):+.1f} to {100 * max(found):+.1f} %" for found in errors.values())
        print(
            f"| {strategy} | {len(pairs)} of {len(cells)} | {said:.2f} s | {found:.2f} s | {100 * (said / found - 1):+.1f} % "
            f"| {each} | {steps} | {step} |"
        )


if __name__ == "__main__":
    {"predict": predict, "measure": measure, "table": table}[sys.argv[1]]()
