"""Tune the built-in quickstart several times; keep what was simulated beside what was measured, and draw it.

Run from the repository's root: ``python reports/quickstart/measure.py [ROUNDS]``. Writes ``raw.json`` and
``simulated_against_real.png``, and prints the table of README.md.
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
                simulated_against_real(report.tune.arms).savefig(HERE / "simulated_against_real.png", dpi=130)
        print(f"{number}: {recommendation.line} ({done[-1]['tune_s']:.0f} s)", flush=True)
        data = {"started": started, "machine": machine(), "versions": versions(), "rounds": done}
        (HERE / "raw.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
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
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
