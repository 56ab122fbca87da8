"""How often is the verdict of time to target wrong? Replays of planted truths through the product's own decision, without a launch.

Run from the repository's root: ``python reports/tuner/guard_target.py [REPLAYS]``. Adds to ``guard_target.json`` what it lacks, and
prints README.md's tables.

A replay plants a true ratio of times to the target: steps are 1.3 times as fast, and updates make up the rest. Runs to the target
differ by 15 or 18 % between seeds, of whose variance the two runs of a seed share a part, and a share of them does not arrive.
Pairs of legs have recorded noise (``guard.py``) of 0.06, and stop as ``tuner.verify`` stops its first finalist.

``spreads`` are those that the prior of few seeds stands for: paired log ratios of steps to a target in the runs of other reports.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from guard import CHECKED, HERE, LIMIT, REPORTS, TRUTHS, Kind, at_once, cell, drawn, in_tunings, means, recorded_noise
from scipy import stats

from fleetbench.store import commit, machine, versions
from tuner.sequential import ERROR, Judgement
from tuner.to_target import FEWEST_SEEDS, SPREAD, SPREAD_FREE, Updates

STEPS_FASTER, DEVIATION, UPDATES = 1.3, 0.06, 100.0
GAINS = (0.90, *TRUTHS, STEPS_FASTER)


class Case(NamedTuple):
    """What runs to the target are like."""

    seeds: int
    spread: float
    """Deviation of the logarithm of a run's steps."""
    shared: float = 0.5
    """Of the variance, by both runs of a seed."""
    lost: float = 0.0
    """Share of runs that do not arrive."""
    ended: tuple[int, ...] = ()
    """Pairs after which a budget ends, and ``--from`` goes on."""


CASES = (
    *(Case(seeds, spread) for seeds in (1, 2, 3, 5, 8) for spread in (0.15, 0.18)),
    *(Case(seeds, 0.15, 0.92) for seeds in (1, 2, 3, 5)),
    *(Case(seeds, 0.18, 0.0) for seeds in (1, 2, 3, 5)),
    *(Case(seeds, 0.18, 0.5, 0.15) for seeds in (2, 3, 5)),
    *(Case(5, spread, 0.5, 0.0, ended) for spread in (0.15, 0.18) for ended in ((6, 12, 24), tuple(range(5, LIMIT, 5)))),
)
"""Half shared; as firmly paired as FACTS of two K say, 6 % between ratios; a script that takes no seed, whose runs share nothing."""


def replays(count: int, gain: float, case: Case, noise: Any) -> dict[str, Any]:
    """A cell: verdicts, and how often the interval holds, which is without an end where too few seeds arrive twice."""
    key = [round(1000 * gain), case.seeds, *(round(1000 * one) for one in case[1:4]), len(case.ended)]
    generator = np.random.default_rng(key)
    shared = generator.normal(0, case.spread * math.sqrt(case.shared), (count, case.seeds, 1))
    runs = UPDATES * np.exp(shared + generator.normal(0, case.spread * math.sqrt(1 - case.shared), (count, case.seeds, 2)))
    runs[..., 1] *= STEPS_FASTER / gain
    end = math.inf if not case.lost else float(np.quantile(runs, 1 - case.lost))
    pairs = drawn(Kind(recorded=True), np.full(count, math.log(STEPS_FASTER)), np.full(count, DEVIATION), noise, generator)
    found: list[Judgement] = []
    checked = None if case.lost else CHECKED if len(case.ended) < 5 else 0
    for ways, ratios in zip(np.moveaxis(runs, 2, 1).tolist(), pairs[:checked].tolist(), strict=False):
        default, own = ([one if one <= end else None for one in way] for way in ways)
        if any(one is not None for one in own):  # otherwise it is rejected
            updates, enough = Updates.of_runs(default, own, end), case.seeds >= FEWEST_SEEDS
            updates = Updates(updates.ratios, updates.known, spread=0.0 if enough else SPREAD)
            found.append(in_tunings(ratios, case.ended, updates, enough=enough))
    known = {**case._asdict(), "gain": gain}
    if case.lost:
        return {**known, **cell(found, np.full(len(found), math.log(gain)))}
    whole = at_once(pairs, case.ended, updates=np.log(runs[..., 0] / runs[..., 1]), truth=math.log(gain))
    if found:
        again = cell(found, np.full(len(found), math.log(gain)))
        for name, other in (("USE", "USE"), ("NO GAIN", "NO GAIN"), ("covered", "covered"), ("pairs", "mean_pairs")):
            assert math.isclose(whole[name][:CHECKED].mean(), again[other]), (name, case, gain)
    return {**known, **means([whole])}


def spreads() -> dict[str, Any]:
    """Deviations of paired log ratios of steps to a target, and how often the prior's interval of one seed holds their mean."""
    series: list[tuple[str, list[float]]] = []
    rows = json.loads((HERE / "targets_real.json").read_text())["rows"]
    for row in rows:
        steps = row["steps"]
        series += [(f"targets_real {row['name']} {way}", _ratios(steps["default"], steps[way])) for way in ("before", "now")]
    arms = json.loads((REPORTS / "quickstart" / "demo.json").read_text())["arms"]
    series += [("quickstart", _ratios(arms[0]["target"]["updates"], arm["target"]["updates"])) for arm in arms[1:] if arm.get("target")]
    by_seed: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for line in (REPORTS / "virtual_trainers" / "testbed.jsonl").read_text().splitlines():
        run = json.loads(line)
        by_seed["testbed", run["predictions"], run["strategy"]][run["seed"]] = run["steps_to_target"]
    for line in (REPORTS / "virtual_trainers" / "known_results.jsonl").read_text().splitlines():
        run = json.loads(line)
        if run.get("part") == "local" and run["what"] == "seed" and run["slow"] is not None:  # the step's seconds are constant
            by_seed["known_results", f"{run['unlike']}", f"{run['strategy']} {run['lr']}"][run["seed"]] = run["slow"]
    for (report, which, strategy), steps in by_seed.items():
        for (_, other, name), own in by_seed.items():
            if name.startswith("synchronous") and other == which and not strategy.startswith("synchronous"):
                both = sorted({*own} & {*steps})
                series.append((f"{report} {which[:4]} {strategy}", _ratios([own[seed] for seed in both], [steps[seed] for seed in both])))
    series += _crossings()
    deviations = {name: float(np.std(ratios, ddof=1)) for name, ratios in series}
    off = [abs(ratio - np.mean(ratios)) * math.sqrt(len(ratios) / (len(ratios) - 1)) for _, ratios in series for ratio in ratios]
    squares = sum(float(np.var(ratios, ddof=1)) * (len(ratios) - 1) for _, ratios in series)
    half = float(stats.t.isf(ERROR, SPREAD_FREE)) * SPREAD
    return {
        "series": {name: round(one, 4) for name, one in deviations.items()},
        "together": math.sqrt(squares / sum(len(ratios) - 1 for _, ratios in series)),
        "median": float(np.median([*deviations.values()])),
        "ninth of ten": float(np.quantile([*deviations.values()], 0.9)),
        "prior": {"spread": SPREAD, "free": SPREAD_FREE, "half": half, "holds": float(np.mean([one <= half for one in off]))},
    }


def _ratios(default: list[float | None], own: list[float | None]) -> list[float]:
    return [math.log(one / other) for one, other in zip(default, own, strict=True) if one is not None and other is not None]


def _crossings() -> list[tuple[str, list[float]]]:
    """Of the workloads that notice K: steps to the lowest held-out loss that all six runs of two K reach, and 2 % more."""
    curves: dict[tuple[str, float, int], list[list[list[float]]]] = defaultdict(list)
    for line in (REPORTS / "virtual_trainers" / "notices.jsonl").read_text().splitlines():
        run = json.loads(line)
        curves[run["workload"], run["unlike"], run["k"]].append(run["held_out"])
    found = []
    for (workload, unlike, k), own in curves.items():
        default = curves[workload, unlike, 1]
        target = 1.02 * max(min(loss for _, loss in curve) for curve in (*own, *default))
        if k > 1:
            pair = _ratios([_crossing(one, target) for one in default], [_crossing(one, target) for one in own])
            found.append((f"{workload}, unlike {unlike:g}, K = {k}", pair))
    return [(name, ratios) for name, ratios in found if len(ratios) > 1]


def _crossing(curve: list[list[float]], target: float) -> float | None:
    for (before, higher), (after, lower) in pairwise(curve):
        if lower <= target < higher:
            return before + (after - before) * (higher - target) / (higher - lower)
    return None


def main(count: int) -> None:
    """Replay the cells that the raw result lacks, each of which is written at once, and print the tables."""
    path, noise, now = HERE / "guard_target.json", recorded_noise(), {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    head = {**now, "machine": machine(), "versions": versions()}
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {**head, "spreads": spreads(), "cells": []}
    known = {(*(one[name] if name != "ended" else tuple(one[name]) for name in Case._fields), one["gain"]) for one in data["cells"]}
    for case in CASES:
        for gain in GAINS:
            if (*case, gain) not in known:
                data["cells"].append(replays(count // 10 if case.lost else count, gain, case, noise) | now)  # a likelihood takes long
                print(json.dumps(data["cells"][-1]), file=sys.stderr, flush=True)
                path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    tables(data)


def tables(data: dict[str, Any]) -> None:
    """Print README.md's tables: of each case USE by true gain, and in how many replays the interval holds."""
    print({name: one for name, one in data["spreads"].items() if name != "series"})
    columns = "seeds", "spread", "shared", "never arrive", "budgets end after", *(f"{100 * (gain - 1):+.0f} %" for gain in GAINS), "covered"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for case in CASES:
        own = [
            one for one in data["cells"] if Case(**{name: one[name] for name in Case._fields})._replace(ended=tuple(one["ended"])) == case
        ]
        shares = " | ".join(f"{100 * one['USE']:.1f}" for one in own)
        covered = f"{100 * min(one['covered'] for one in own):.1f} to {100 * max(one['covered'] for one in own):.1f}"
        what = f"{case.seeds} | {100 * case.spread:.0f} % | {100 * case.shared:.0f} % | {100 * case.lost:.0f} % | {len(case.ended) or ''}"
        print(f"| {what} | {shares} | {covered} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
