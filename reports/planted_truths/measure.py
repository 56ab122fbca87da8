"""Tune the two planted truths ten times each, and measure every recommendation again.

Run from the repository's root: ``python reports/planted_truths/measure.py [ROUNDS]``. Writes ``raw.json``
(every verdict with its pairs) and prints the table of README.md. Each round takes its own profile.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleetbench import Experiment, tune
from fleetbench.config import encode
from fleetbench.store import machine, versions
from tuner.pairs import remeasure

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
EXPECTED = {"planted_gain": "USE", "planted_none": "KEEP DEFAULT"}


def one_round(name: str, seed: int) -> dict[str, Any]:
    """Tune one example from nothing; where it says USE, measure that again in a launch of its own."""
    experiment = Experiment.load(EXAMPLES / f"{name}.toml", [f"run.seed={seed}"])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        recommendation, path = tune(experiment, out=Path(folder))
        tuned = Experiment.load(path / "experiment.toml")
        found = {
            "example": name,
            "seed": seed,
            "verdict": recommendation.verdict,
            "line": recommendation.line,
            "speedup": [recommendation.speedup, recommendation.low, recommendation.high],
            "pairs": encode(recommendation.pairs),
            "arms": [{"name": arm.name, "simulated_s": arm.simulated_s, "measured_s": arm.measured_s} for arm in recommendation.arms],
            "tune_s": time.monotonic() - begin,
        }
        if recommendation.verdict == "USE":
            again, pairs = remeasure(tuned, recommendation.strategy)
            found |= {"again": [again.mean, again.low, again.high], "again_pairs": encode(pairs)}
            found["overlaps"] = bool(again.low <= (recommendation.high or 0) and (recommendation.low or 0) <= again.high)
    return found


def main(rounds: int) -> None:
    """Alternate the examples, and keep what is done after every round."""
    started = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    done: list[dict[str, Any]] = []
    for seed in range(rounds):
        for name, expected in EXPECTED.items():
            found = one_round(name, seed)
            done.append(found)
            right = found["verdict"] == expected and found.get("overlaps", True)
            print(f"| {name} | {seed} | {found['line']} | {found.get('again', '')} | {'right' if right else 'WRONG'} |", flush=True)
            data = {"started": started, "machine": machine(), "versions": versions(), "rounds": done}
            (HERE / "raw.json").write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
