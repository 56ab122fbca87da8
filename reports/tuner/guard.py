"""How often is the tuner's verdict wrong? Replays of planted truths through the product's own decision, without a launch.

Run from the repository's root: ``python reports/tuner/guard.py [REPLAYS]``. Writes ``guard.json`` and prints README.md's tables.

A replay plants a true gain, draws the log ratios of up to 48 pairs around it, and asks ``tuner.sequential.judge`` at every look, as
``tuner.verify`` does for its first finalist. The noise of a pair is normal, or resampled from recorded pairs; what a machine adds is
drawn on top, leg by leg. Critical values know nothing of this: they are those of simulated normal ratios.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetbench.store import machine, versions
from tuner.sequential import ERROR, Judgement, critical_values, judge, looks, spent
from tuner.verify import error_of

HERE = Path(__file__).parent
REPORTS = HERE.parent
LIMIT, MIN_GAIN = 48, 0.02
FIRST = error_of(ERROR, is_last=False)
"""Error of the first finalist where others may follow: what ``tune`` uses with its defaults."""
DEVIATIONS = (0.03, 0.06, 0.12)
TRUTHS = (0.98, 1.0, 1.02, 1.05, 1.10)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """What the pairs of a replay suffer from."""

    recorded: bool = False
    """Noise resampled from recorded pairs instead of normal."""
    drift: bool = False
    """The machine's speed wanders: by a hundredth a leg at random, and by a tenth up and down in 37 legs."""
    position: bool = False
    """A pair's second leg is slower by half of the pairs' deviation."""
    outliers: bool = False
    """One leg in thirty takes longer, by 30 % on average."""
    launches: bool = False
    """Every eight pairs another launch, which favours either strategy by a sixth of the pairs' deviation."""


KINDS = {
    "normal": Kind(),
    "recorded": Kind(recorded=True),
    "drift": Kind(recorded=True, drift=True),
    "position": Kind(recorded=True, position=True),
    "outliers": Kind(recorded=True, outliers=True),
    "launches": Kind(recorded=True, launches=True),
    "all": Kind(recorded=True, drift=True, position=True, outliers=True, launches=True),
}


def recorded_sets() -> dict[str, list[list[float]]]:
    """Log ratios of every stored tuning's pairs, by report."""
    found: dict[str, list[list[float]]] = {"earlier": json.loads((HERE / "earlier_pairs.json").read_text())["sets"]}
    rounds = json.loads((REPORTS / "planted_truths" / "raw.json").read_text())["rounds"]
    found["planted_truths"] = [_logs(entry.get(key) or []) for entry in rounds for key in ("pairs", "again_pairs")]
    quickstart = json.loads((REPORTS / "quickstart" / "raw.json").read_text())["rounds"]
    found["quickstart"] = [_logs(entry["recommendation"]["pairs"]) for entry in quickstart]
    lines = [json.loads(line) for name in ("raw", "earlier") for line in (REPORTS / "your_script" / f"{name}.jsonl").open() if line.strip()]
    found["your_script"] = [_logs(line["recommendation"]["pairs"]) for line in lines if "recommendation" in line]
    return {report: [one for one in sets if len(one) > 1] for report, sets in found.items()}


def _logs(pairs: list[dict[str, Any]]) -> list[float]:
    return [math.log(pair["default_s"] / pair["finalist_s"]) for pair in pairs]


def recorded_noise() -> Floats:
    """Residuals of all recorded pairs in units of their report's deviation, so that sets keep their tails; of deviation 1."""
    pool: list[float] = []
    for sets in recorded_sets().values():
        residuals = [(np.array(one) - np.mean(one)) * math.sqrt(len(one) / (len(one) - 1)) for one in sets]
        together = np.concatenate(residuals)
        pool.extend(together / together.std())
    noise = np.array(pool)
    return np.asarray((noise - noise.mean()) / noise.std())


def drawn(kind: Kind, truths: Floats, deviations: Floats, noise: Floats, generator: np.random.Generator) -> Floats:
    """Log ratios of replays, shape ``(replays, LIMIT)``; legs are in the order A B, B A, A B, ...."""
    shape, scale = (len(truths), LIMIT), deviations[:, None]
    unit = generator.choice(noise, shape) if kind.recorded else generator.normal(size=shape)
    first = np.where(np.arange(LIMIT) % 2 == 0, 1.0, -1.0)  # 1: the default's leg comes first
    ratios = truths[:, None] + scale * unit
    if kind.drift:
        legs = np.cumsum(generator.normal(0, 0.01, (len(truths), 2 * LIMIT)), axis=1)
        legs += 0.05 * np.sin(2 * math.pi * (np.arange(2 * LIMIT) / 37 + generator.random((len(truths), 1))))
        ratios += first * (legs[:, 0::2] - legs[:, 1::2])
    if kind.position:
        ratios -= first * scale / 2
    if kind.outliers:
        hit = generator.random((2, *shape)) < 1 / 30
        late = np.log1p(hit * generator.exponential(0.3, hit.shape))
        ratios += late[0] - late[1]
    if kind.launches:
        ratios += scale / 6 * np.repeat(generator.normal(size=(len(truths), LIMIT // 8)), 8, axis=1)
    return ratios


def judged(ratios: list[float], error: float = FIRST) -> Judgement:
    """What the product says of pairs that come one by one."""
    found = (judge(ratios[:count], MIN_GAIN, LIMIT, error=error) for count in looks(LIMIT))
    return next(one for one in found if one is not None)


def cell(found: list[Judgement], truths: Floats) -> dict[str, Any]:
    """Shares of verdicts, coverage and pairs of some replays."""
    pairs = np.array([one.pairs for one in found])
    covered = [one.speedup.low <= math.exp(truth) <= one.speedup.high for one, truth in zip(found, truths, strict=True)]
    shares = {verdict: float(np.mean([one.verdict == verdict for one in found])) for verdict in ("USE", "NO GAIN", "UNDECIDED")}
    return {
        "replays": len(found),
        **shares,
        "covered": float(np.mean(covered)),
        "median_pairs": float(np.median(pairs)),
        "mean_pairs": float(pairs.mean()),
        "stops": {str(look): int((pairs == look).sum()) for look in looks(LIMIT)},
    }


def grid(replays: int, noise: Floats) -> list[dict[str, Any]]:
    """A cell for every kind, truth and deviation."""
    cells = []
    for number, (name, kind) in enumerate(KINDS.items()):
        for gain in TRUTHS:
            for deviation in DEVIATIONS:
                generator = np.random.default_rng([number, round(1000 * gain), round(1000 * deviation)])
                count = 4 * replays if gain == 1 + MIN_GAIN and name in ("normal", "recorded") else replays  # errors of 5 % show in many
                truths = np.full(count, math.log(gain))
                ratios = drawn(kind, truths, np.full(count, deviation), noise, generator)
                found = [judged(row) for row in ratios.tolist()]
                cells.append({"kind": name, "gain": gain, "deviation": deviation, **cell(found, truths)})
                print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    return cells


def mixed(replays: int, noise: Floats) -> list[dict[str, Any]]:
    """Truths from 10 % slower to 30 % faster and deviations from 0.01 to 0.15, at random: false gains, missed gains, coverage."""
    cells = []
    for number, (name, kind) in enumerate(KINDS.items()):
        generator = np.random.default_rng([99, number])
        truths = np.log(generator.uniform(0.9, 1.3, replays))
        deviations = np.exp(generator.uniform(math.log(0.01), math.log(0.15), replays))
        found = [judged(row) for row in drawn(kind, truths, deviations, noise, generator).tolist()]
        gains = truths > math.log1p(MIN_GAIN)
        false = [one.verdict == "USE" for one, gain in zip(found, gains, strict=True) if not gain]
        missed = [one.verdict == "NO GAIN" for one, gain in zip(found, gains, strict=True) if gain]
        cells.append({"kind": name, **cell(found, truths), "false_use": float(np.mean(false)), "false_no_gain": float(np.mean(missed))})
    return cells


def chains(replays: int, noise: Floats) -> list[dict[str, Any]]:
    """Three finalists one after another, each exactly at ``min_gain``: how often is any of them used?"""
    cells = []
    for deviation in DEVIATIONS:
        generator = np.random.default_rng([77, round(1000 * deviation)])
        used = 0
        for _ in range(replays):
            left = ERROR
            for number in range(3):
                error = error_of(left, is_last=number == 2)
                left -= error
                truths = np.full(1, math.log1p(MIN_GAIN))
                found = judged(drawn(Kind(recorded=True), truths, np.full(1, deviation), noise, generator)[0].tolist(), error)
                used += found.verdict == "USE"
                if found.verdict != "NO GAIN":
                    break
        cells.append({"deviation": deviation, "replays": replays, "USE": used / replays})
    return cells


def calibration(batches: int = 8, size: int = 50_000) -> dict[str, float]:
    """Of fresh normal sequences exactly at ``min_gain``, many at once: USE, no gain, and intervals that hold."""
    at = looks(LIMIT)
    shares = tuple(spent(look, LIMIT) for look in at)
    low, high = (np.array(critical_values(at, shares, error))[:, None] for error in (FIRST, ERROR))
    num_used = num_without = 0
    for seed in range(batches):
        ratios = np.random.default_rng([5, seed]).normal(size=(size, LIMIT))
        t = np.array([ratios[:, :look].mean(1) / ratios[:, :look].std(1, ddof=1) * math.sqrt(look) for look in at])
        is_out = (t > low) | (t < -high)
        last = np.where(is_out.any(0), is_out.argmax(0), len(at) - 1)[None]
        num_used += int(np.take_along_axis(t > low, last, 0).sum())
        num_without += int(np.take_along_axis(t < -high, last, 0).sum())
    count = batches * size
    return {"replays": count, "USE": num_used / count, "NO GAIN": num_without / count, "covered": 1 - (num_used + num_without) / count}


def main(replays: int) -> None:
    """Write the raw result and print the tables."""
    noise = recorded_noise()
    sets = {report: len(found) for report, found in recorded_sets().items()}
    data: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine(),
        "versions": versions(),
        "recorded": {"sets": sets, "pairs": len(noise), "kurtosis": float((noise**4).mean()), "largest": float(np.abs(noise).max())},
        "kinds": {name: dataclasses.asdict(kind) for name, kind in KINDS.items()},
        "calibration": calibration(),
        "grid": grid(replays, noise),
        "mixed": mixed(replays, noise),
        "chains": chains(replays, noise),
    }
    (HERE / "guard.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    tables(data)


def tables(data: dict[str, Any]) -> None:
    """Print README.md's tables."""
    print(
        "| noise | true gain | deviation | USE | no gain | undecided | covered | pairs: median, mean |\n|---|---|---|---|---|---|---|---|"
    )
    for one in data["grid"]:
        shares = " | ".join(f"{100 * one[key]:.1f} %" for key in ("USE", "NO GAIN", "UNDECIDED", "covered"))
        pairs = f"{one['median_pairs']:g}, {one['mean_pairs']:.1f}"
        print(f"| {one['kind']} | {100 * (one['gain'] - 1):+.0f} % | {one['deviation']} | {shares} | {pairs} |")
    for one in data["mixed"]:
        print(one["kind"], {key: round(one[key], 4) for key in ("false_use", "false_no_gain", "covered", "UNDECIDED", "mean_pairs")})
    for one in (*data["chains"], data["calibration"]):
        print(one)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
