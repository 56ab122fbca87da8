"""Tune the built-in quickstart several times; keep what was simulated beside what was measured, and draw it.

Run from the repository's root: ``python reports/quickstart/measure.py [ROUNDS]``. Writes ``raw.json`` and
``simulated_against_real.png``, and prints the tables of README.md. ``--tables`` prints them from ``raw.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleetbench import Experiment, tune
from fleetbench.config import encode
from fleetbench.report.figures import simulated_against_real
from fleetbench.report.model import read_report
from fleetbench.store import machine, versions

HERE = Path(__file__).parent


def main(rounds: int) -> None:
    """Every round profiles, searches and verifies from nothing."""
    started = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    done: list[dict[str, Any]] = []
    for number in range(rounds):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            recommendation, path = tune(Experiment.load(), out=Path(folder))
            done.append({"tune_s": time.monotonic() - begin, "recommendation": encode(recommendation)})
            report = read_report(path)
            if number == rounds - 1 and report.tune is not None:
                simulated_against_real(report.tune.recommendation.arms).savefig(HERE / "simulated_against_real.png", dpi=130)
        print(f"{number}: {recommendation.line} ({done[-1]['tune_s']:.0f} s)", flush=True)
        data = {"started": started, "machine": machine(), "versions": versions(), "rounds": done}
        (HERE / "raw.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    tables(done)


def tables(done: list[dict[str, Any]]) -> None:
    """Print every figure of README.md."""
    print("| K | arm | n | simulated ms, median | real ms, median [range] | error, median [range] |\n|---|---|---|---|---|---|")
    for (local_steps, kind), arms in sorted(_by_kind(done).items()):
        simulated = [1e3 * arm["simulated_s"] for arm in arms]
        real = [1e3 * statistics.mean(arm["measured_s"]) for arm in arms]
        error = [100 * (s / r - 1) for s, r in zip(simulated, real, strict=True)]
        print(
            f"| {local_steps} | {kind} | {len(arms)} | {statistics.median(simulated):.1f} "
            f"| {statistics.median(real):.1f} [{min(real):.1f}, {max(real):.1f}] "
            f"| {statistics.median(error):+.0f} % [{min(error):+.0f}, {max(error):+.0f}] |"
        )

    _default_against_pairs(done)
    _orders(done)


def _default_against_pairs(done: list[dict[str, Any]]) -> None:
    """The default's error against its legs of six pairs, which are more and alternate, beside that against its two legs among the arms."""
    print(
        "\n| round | default simulated, ms | two legs among the arms, ms (error) | six legs of the pairs, ms (error) |\n|---|---|---|---|"
    )
    errors: list[tuple[float, float]] = []
    for number, entry in enumerate(done, start=1):
        arm = _arms(entry)["default"]
        few, many = statistics.mean(arm["measured_s"]), statistics.mean(pair["default_s"] for pair in entry["recommendation"]["pairs"])
        errors.append((arm["simulated_s"] / few - 1, arm["simulated_s"] / many - 1))
        cells = [f"{1e3 * took:.1f} ({error:+.1%})" for took, error in zip((few, many), errors[-1], strict=True)]
        print(f"| {number} | {1e3 * arm['simulated_s']:.1f} | {cells[0]} | {cells[1]} |")
    two, six = (statistics.median(column) for column in zip(*errors, strict=True))
    print(f"\nmedian error: {two:+.1%} against two legs, {six:+.1%} against six")


def _orders(done: list[dict[str, Any]]) -> None:
    """In how many rounds the simulated order of the arms is the measured one."""
    for left_out in ((), ("advice",)):
        wrong = 0
        for entry in done:
            arms = {name: arm for name, arm in _arms(entry).items() if name not in left_out}
            simulated = sorted(arms, key=lambda name: arms[name]["simulated_s"])
            wrong += simulated != sorted(arms, key=lambda name: statistics.mean(arms[name]["measured_s"]))
        print(f"order of the arms{' but the advice' if left_out else ''}: wrong in {wrong} of {len(done)} rounds")


def _arms(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in entry["recommendation"]["arms"]}


def _by_kind(done: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    kinds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for entry in done:
        for arm in entry["recommendation"]["arms"]:
            strategy = arm["strategy"]
            local_steps = strategy["localsgd_configs"]["k_steps"] if strategy["localsgd"] else 1
            kind = arm["name"] if not arm["name"].startswith("candidate") else "candidate"
            kinds.setdefault((local_steps, kind), []).append(arm)
    return kinds


if __name__ == "__main__":
    if sys.argv[1:] == ["--tables"]:
        tables(json.loads((HERE / "raw.json").read_text(encoding="utf-8"))["rounds"])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
