"""How often is the tuner's verdict wrong? Replays of planted truths through the product's own decision, without a launch.

Run from the repository's root: ``python reports/tuner/guard.py [REPLAYS]``. Writes ``guard.json`` and prints README.md's tables.

A replay plants a true gain, draws the log ratios of up to 48 pairs around it, and asks ``tuner.sequential.judge`` at every look, as
``tuner.verify`` does for its first finalist. The noise of a pair is normal, or resampled from recorded pairs; what a machine adds is
drawn on top, leg by leg. Critical values know nothing of this: they are those of simulated normal ratios. ``continued`` lets budgets end,
and tunings go on from each other (``--from``). Its rows, and those of ``guard_target.py``, are judged ``at_once``, and the first hundred
replays of each by the product, too.
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
from scipy import stats

from fleetbench.store import machine, versions
from tuner.ledger import FIRST_SHARE
from tuner.sequential import ERROR, Judgement, critical_values, judge, looks, planned, spent, widening
from tuner.to_target import FEWEST_SEEDS, SPREAD, SPREAD_FREE, Updates

HERE = Path(__file__).parent
REPORTS = HERE.parent
LIMIT, MIN_GAIN = 48, 0.02
FIRST = FIRST_SHARE * ERROR
"""Error of the first finalist."""
DEVIATIONS = (0.03, 0.06, 0.12)
TRUTHS = (0.98, 1.0, 1.02, 1.05, 1.10)
CHECKED = 100
"""Replays of a row of ``at_once`` that ``judge`` judges again."""
ENDS = {
    "never": (),
    "8": (8,),
    "6, 12, 24": (6, 12, 24),
    "5, 10, 15, ..., 45": tuple(range(5, LIMIT, 5)),
    "every pair from 3 on": tuple(range(3, LIMIT)),
}
"""After how many pairs budgets end."""
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
    lag_1: float = 0.0
    """Correlation of neighbouring pairs, of a first-order autoregression."""


KINDS = {
    "normal": Kind(),
    "recorded": Kind(recorded=True),
    "drift": Kind(recorded=True, drift=True),
    "position": Kind(recorded=True, position=True),
    "outliers": Kind(recorded=True, outliers=True),
    "launches": Kind(recorded=True, launches=True),
    "neighbours 0.2": Kind(lag_1=0.2),
    "neighbours 0.4": Kind(lag_1=0.4),
    "all": Kind(recorded=True, drift=True, position=True, outliers=True, launches=True),
}


MANY = ("normal", "recorded", "neighbours 0.2", "neighbours 0.4")
"""Kinds of which an error of 5 % is to show."""


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
    for pair in range(1, LIMIT if kind.lag_1 else 0):
        unit[:, pair] = kind.lag_1 * unit[:, pair - 1] + math.sqrt(1 - kind.lag_1**2) * unit[:, pair]
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


def at_once(
    pairs: Floats, ended: tuple[int, ...] = (), updates: Floats | None = None, truth: float = math.log1p(MIN_GAIN)
) -> dict[str, Floats]:
    """The same of all replays together, for the first finalist, through the product's shares and critical values.

    ``ended``: after so many pairs a budget ends, and ``--from`` goes on. ``updates``: log ratios to the target, by seed, all of which
    arrive. Shape of each result: ``(replays,)``.
    """
    free, squares, half, share = 0, 0.0, [0.0, 0.0], 1.0
    enough = updates is None or updates.shape[1] >= FEWEST_SEEDS
    limit = LIMIT if enough else 8
    shares = planned(limit, ended)
    mean_updates: Floats | float = 0.0
    if updates is not None:
        seeds, share, mean_updates = updates.shape[1], 0.9, updates.mean(axis=1)
        free, squares = (0, 0.0) if enough else (SPREAD_FREE, SPREAD_FREE * SPREAD**2)
        sem = np.sqrt((squares + seeds * updates.var(axis=1)) / (free + seeds - 1) / seeds)
        half = [float(stats.t.isf(share * error, free + seeds - 1)) * sem for error in (FIRST, ERROR)]
    critical = [critical_values((*shares,), (*shares.values(),), share * error) for error in (FIRST, ERROR)]
    use, none, covered, stops = np.zeros((4, len(pairs)))
    for number, look in enumerate(shares):
        mean = pairs[:, :look].mean(axis=1) + mean_updates
        step = pairs[:, :look].std(axis=1, ddof=1) * widening(pairs[:, :look]) / math.sqrt(look)
        low, high = (np.hypot(one[number] * step, of_updates) for one, of_updates in zip(critical, half, strict=True))
        off = mean - math.log1p(MIN_GAIN)
        of_pairs, of_updates = (np.where(off > 0, *ends) for ends in ([one[number] * step for one in critical], half))
        is_in_vain = (of_updates > abs(off)) & (of_updates > 3 * of_pairs)
        ends = (stops == 0) & ((off > low) | (off < -high) | is_in_vain | (look == limit))
        use[ends], none[ends], stops[ends] = ((off > low) & enough)[ends], (off < -high)[ends], look
        covered[ends] = ((mean - low <= truth) & (truth <= mean + high))[ends]
    return {"USE": use, "NO GAIN": none, "covered": covered, "pairs": stops}


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
                count = 4 * replays if gain == 1 + MIN_GAIN and name in MANY else replays  # errors of 5 % show in many
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
            for _ in range(3):
                error = FIRST_SHARE * left
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
    normal = [np.random.default_rng([5, seed]).normal(math.log1p(MIN_GAIN), 0.06, (size, LIMIT)) for seed in range(batches)]
    return means([at_once(ratios) for ratios in normal])


def means(batches: list[dict[str, Floats]]) -> dict[str, float]:
    """Of replays of several batches."""
    whole = {name: np.concatenate([one[name] for one in batches]) for name in batches[0]}
    return {"replays": len(whole["USE"]), **{name: float(one.mean()) for name, one in whole.items()}}


def continued(replays: int, noise: Floats) -> list[dict[str, Any]]:
    """A budget ends, and ``--from`` goes on with a larger one, again and again; beside them what looks would do that forget each other."""
    cells = []
    for name, ended in ENDS.items():
        for gain in (1.0, 1 + MIN_GAIN, 1.05):
            for deviation in (0.03, 0.12):
                generator = np.random.default_rng([88, len(ended), round(1000 * gain), round(1000 * deviation)])
                truths = np.full(replays, math.log(gain))
                ratios = drawn(Kind(recorded=True), truths, np.full(replays, deviation), noise, generator)
                found = at_once(ratios, ended, truth=math.log(gain))
                checked = CHECKED if len(ended) < 5 else 0  # every further end makes critical values anew
                again = [in_tunings(row, ended) for row in ratios[:checked].tolist()]
                assert [one.verdict == "USE" for one in again] == (found["USE"][:checked] > 0).tolist()
                forgotten = float(forgetting(ratios, ended).mean())
                cells.append({"ended": name, "gain": gain, "deviation": deviation, **means([found]), "forgetting": forgotten})
                print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    return cells


def in_tunings(ratios: list[float], ended: tuple[int, ...], updates: Updates | None = None, *, enough: bool = True) -> Judgement:
    """What the product says in the last of the tunings that go on from each other, each of which judges the pairs of the earlier ones."""
    for count in sorted({*looks(LIMIT), *ended}):
        before = tuple(end for end in ended if end < count)
        now = judge(ratios[:count], MIN_GAIN, LIMIT, error=FIRST, updates=updates, enough=enough, ended=before, final=count in ended)
        if now is not None and now.verdict == "UNDECIDED" and count in ended:  # the next tuning
            ends = (*before, count)
            now = judge(ratios[:count], MIN_GAIN, LIMIT, error=FIRST, updates=updates, enough=enough, ended=ends)
        if now is not None:
            return now
    raise AssertionError("the limit is a look")


def forgetting(ratios: Floats, ended: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Whether any of the tunings uses the finalist, if each has the error of one that begins."""
    used = np.zeros(len(ratios), dtype=bool)
    for end in (*ended, LIMIT):
        at = (*(look for look in looks(LIMIT) if look < end), end)
        shares = (*(spent(look, LIMIT) for look in at[:-1]), 1.0)
        for look, critical in zip(at, critical_values(at, shares, FIRST), strict=True):
            own = ratios[:, :look]
            used |= (own.mean(axis=1) - math.log1p(MIN_GAIN)) / own.std(axis=1, ddof=1) * math.sqrt(look) > critical
    return used


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
        "continued": continued(max(20_000, replays), noise),
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
    columns = "budgets end after pairs", "true gain", "deviation", "USE", "forgetting", "no gain", "covered", "pairs"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for one in data["continued"]:
        shares = " | ".join(f"{100 * one[key]:.1f} %" for key in ("USE", "forgetting", "NO GAIN", "covered"))
        print(f"| {one['ended']} | {100 * (one['gain'] - 1):+.0f} % | {one['deviation']} | {shares} | {one['pairs']:.1f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
