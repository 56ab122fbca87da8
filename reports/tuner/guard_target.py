"""How often is the verdict of time to target wrong? Replays of planted truths through the product's own decision, without a launch.

Run from the repository's root: ``python reports/tuner/guard_target.py [REPLAYS]``. Writes ``guard_target.json``, prints README.md's table.

A replay plants a true ratio of times to the target: steps are 1.3 times as fast, and updates make up the rest. Runs to the target
differ by 15 or 18 % between seeds, half of which the two runs of a seed share, and a share of them does not arrive. Pairs of legs have
recorded noise (``guard.py``) of 0.06, and stop as ``tuner.verify`` stops its first finalist.
"""

from __future__ import annotations

import json
import math
import sys
from datetime import UTC, datetime
from typing import Any

import numpy as np
from guard import FIRST, HERE, LIMIT, MIN_GAIN, TRUTHS, Kind, cell, drawn, recorded_noise
from scipy import stats

from fleetbench.store import commit, machine, versions
from tuner.sequential import Judgement, critical_values, judge, looks, spent
from tuner.to_target import Updates

STEPS_FASTER, DEVIATION, UPDATES = 1.3, 0.06, 100.0
CASES = ((3, 0.15, 0.0), (5, 0.15, 0.0), (5, 0.18, 0.0), (5, 0.18, 0.15), (8, 0.15, 0.0))
"""Seeds, spread between them, and the share of runs that do not arrive."""
HARM, LOSS = 0.01, -math.log1p(MIN_GAIN)
"""A stricter rule, which the product does not have: USE only with 99 % confidence, too, that nothing is lost beyond ``LOSS``."""


def replays(count: int, gain: float, case: tuple[int, float, float], noise: Any) -> dict[str, Any]:
    """A cell: verdicts, and how often the interval holds, which is without an end where fewer than two seeds arrive twice."""
    seeds, spread, lost = case
    generator = np.random.default_rng([round(1000 * gain), seeds, round(1000 * spread), round(100 * lost)])
    shared = generator.normal(0, spread * math.sqrt(0.5), (count, seeds, 1))
    runs = UPDATES * np.exp(shared + generator.normal(0, spread * math.sqrt(0.5), (count, seeds, 2)))
    runs[..., 1] *= STEPS_FASTER / gain
    end = math.inf if not lost else float(np.quantile(runs, 1 - lost))
    pairs = drawn(Kind(recorded=True), np.full(count, math.log(STEPS_FASTER)), np.full(count, DEVIATION), noise, generator)
    found: list[Judgement] = []
    strict = 0
    for ways, ratios in zip(np.moveaxis(runs, 2, 1).tolist(), pairs.tolist(), strict=True):
        default, own = ([one if one <= end else None for one in way] for way in ways)
        updates = Updates.of_runs(default, own, end)
        verdicts = (judge(ratios[:look], MIN_GAIN, LIMIT, error=FIRST, updates=updates) for look in looks(LIMIT))
        found.append(next(one for one in verdicts if one is not None))
        strict += found[-1].verdict == "USE" and _low(ratios[: found[-1].pairs], updates) > LOSS
    return {
        "seeds": seeds,
        "spread": spread,
        "lost": lost,
        "gain": gain,
        "strict": strict / count,
        **cell(found, np.full(count, math.log(gain))),
    }


def _low(ratios: list[float], updates: Updates) -> float:
    """Lower end at ``HARM`` of the logarithm of the gain to the target."""
    planned, pairs = looks(LIMIT), np.array(ratios)
    shares = (*(spent(look, LIMIT) for look in planned[:-1]), 1.0)
    critical = critical_values(planned, shares, HARM)[planned.index(len(ratios))]
    return float(pairs.mean()) + updates.mean - math.hypot(critical * float(stats.sem(pairs)), updates.half(HARM, -1))


def main(count: int) -> None:
    """Write the raw result and print the table."""
    noise = recorded_noise()
    head = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine(), "versions": versions()}
    cells = [replays(count, gain, case, noise) for case in CASES for gain in (*TRUTHS, STEPS_FASTER)]
    (HERE / "guard_target.json").write_text(json.dumps({**head, "cells": cells}, indent=1) + "\n", encoding="utf-8")
    columns = "seeds", "spread", "never arrive", "true gain", "USE", "no gain", "undecided", "covered", "USE, if strict"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for one in cells:
        shares = " | ".join(f"{100 * one[key]:.1f} %" for key in ("USE", "NO GAIN", "UNDECIDED", "covered", "strict"))
        case = f"{one['seeds']} | {100 * one['spread']:.0f} % | {100 * one['lost']:.0f} %"
        print(f"| {case} | {100 * (one['gain'] - 1):+.0f} % | {shares} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
