"""Sequential verdicts on pairs of runs: they stop at the look at which they know, and err no more often for having looked.

At looks, after 4, 6, 8, 12, 16, 24, 32, 48, ... pairs, Student's t of the log ratios decides, with critical values under which
all looks together err with the chance that is asked for: a group-sequential t test (Jennison and Turnbull 1991, Biometrika 78)
whose error is spent by a function of the pairs (Lan and DeMets 1983, Biometrika 70), so that looks may end early. The critical
values come from simulated normal ratios; t has no unit, so that they hold for every spread. The interval is a repeated confidence
interval (Jennison and Turnbull 1989, JRSS B 51): mean and critical value times standard error. Those of all looks hold the truth
together, so the one at which the pairs stop does too.

Where the objective is the time to a target, a second factor is known from other runs: updates to the target (``tuner.to_target``). The
logarithms add up, and so do squared distances from the means to the ends of the two intervals (MOVER: Zou and Donner 2008, Statistics in
Medicine 27), on either side by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from fleetbench.stragglers import Floats
from tuner.to_target import Updates

LEAST_PAIRS = 2
"""With fewer there is no interval."""
CONFIDENCE = 0.90
"""Two-sided."""
ERROR = (1 - CONFIDENCE) / 2
"""Chance of the interval's either end, over all looks, that the truth lies beyond it."""
MANY = 10_000
"""Pairs, beyond which a forecast of them says no more."""
_FIRST_LOOK = 4
_EARLY, _EARLY_PAIRS = 0.36, 8
"""Share of the error that the first eight pairs may spend. Found with normal ratios, so that half of those with a gain of 5 % and
a deviation of 0.03 stop by then, and nine in ten with a deviation of 0.06 within 48 pairs."""
_MUCH = 3.0
"""Times as wide as that of a step the updates' interval makes more pairs futile, if it alone has ``1 + min_gain`` inside."""
_DRAWS = 500_000


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast the finalist is as the default, with the ends of its interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of_logs(cls, mean: float, below: float, above: float) -> Speedup:
        """Of a mean log ratio and the distances to its ends."""
        return cls(math.exp(mean), math.exp(mean - below), math.exp(mean + above))

    def __str__(self) -> str:
        return f"{self.mean:.3f}x [{self.low:.3f}, {self.high:.3f}]" if math.isfinite(self.high) else f"{self.mean:.3f}x, no interval"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the pairs say when they stop."""

    verdict: Literal["USE", "NO GAIN", "UNDECIDED"]
    """The interval lies above ``1 + min_gain``, below it, or around it."""
    speedup: Speedup
    """Of the objective: of a step, or, with updates, of the time to the target."""
    step: Speedup
    """Of a step."""
    pairs: int
    pairs_needed: int | None
    """With which the interval would no longer be around ``1 + min_gain``, if mean and spread stay; ``MANY`` at most. None where no number
    would do: the updates alone leave it around."""


def paired_speedup(default_s: Sequence[float], finalist_s: Sequence[float], confidence: float = CONFIDENCE) -> Speedup:
    """Student's t interval of the mean of ``log(default_s[i] / finalist_s[i])``, as ratios of times; of pairs whose number was fixed.

    Pairs share their moment, so what slows the machine for both cancels. Needs at least two pairs.
    """
    ratios = np.log(np.asarray(default_s, dtype=np.float64) / np.asarray(finalist_s, dtype=np.float64))
    assert len(ratios) >= LEAST_PAIRS, "an interval needs at least two pairs"
    half = float(stats.t.ppf((1 + confidence) / 2, len(ratios) - 1)) * float(stats.sem(ratios))
    return Speedup.of_logs(float(ratios.mean()), half, half)


def looks(limit: int) -> tuple[int, ...]:
    """After how many pairs a verdict is looked for, where there are ``limit`` at most: 4, 6, 8, 12, 16, 24, ... and ``limit``."""
    doubled = sorted(first << k for first in (_FIRST_LOOK, 3 * _FIRST_LOOK // 2) for k in range(limit.bit_length()))
    return (*(number for number in doubled if number < limit), limit)


def spent(pairs: int, limit: int) -> float:
    """Share of the error that looks up to this one may take: some of it early, the rest as the square of the pairs; 1 of ``limit``."""
    early = min(1.0, max(0, pairs - LEAST_PAIRS - 1) / (_EARLY_PAIRS - LEAST_PAIRS - 1)) ** 2
    return 1.0 if pairs >= limit else _EARLY * early + (1 - _EARLY) * (pairs / limit) ** 2


def judge(
    log_ratios: Sequence[float],
    min_gain: float,
    limit: int,
    *,
    error: float = ERROR,
    final: bool = False,
    updates: Updates | None = None,
) -> Judgement | None:
    """The verdict on the log ratios (default over finalist) so far; none where more pairs shall be run.

    ``updates``: to the target, where that is the objective and the finalist trains otherwise than the default.

    ``limit`` is the largest number of pairs. ``error`` bounds the chance, over all looks, of USE where the gain is ``min_gain`` or
    less; that of NO GAIN where it is more is ``ERROR``. ``final``: no pair will follow, for a reason that has nothing to do with
    the ratios; a last look takes the error that is left. None then too, where there are too few for an interval.
    """
    count, planned = len(log_ratios), looks(limit)
    final = final or count >= limit
    if count < LEAST_PAIRS or not (final or count in planned):
        return None
    at = (*(look for look in planned if look < count), count) if final else planned
    shares = (*(spent(look, limit) for look in at[:-1]), 1.0)
    below, above = (critical_values(at, shares, chance)[at.index(count)] for chance in (error, ERROR))
    ratios = np.asarray(log_ratios, dtype=np.float64)
    mean, sem, threshold = float(ratios.mean()), float(ratios.std(ddof=1)) / math.sqrt(count), math.log1p(min_gain)
    step = Speedup.of_logs(mean, below * sem, above * sem)
    fixed_below, fixed_above = (0.0, 0.0) if updates is None else (updates.half(error, -1), updates.half(ERROR, 1))
    mean += 0.0 if updates is None else updates.mean
    speedup = Speedup.of_logs(mean, math.hypot(below * sem, fixed_below), math.hypot(above * sem, fixed_above))
    if speedup.low > 1 + min_gain:
        return Judgement("USE", speedup, step, count, count)
    if speedup.high < 1 + min_gain:
        return Judgement("NO GAIN", speedup, step, count, count)
    half, fixed = (below * sem, fixed_below) if mean > threshold else (above * sem, fixed_above)
    distance = abs(mean - threshold)
    is_hopeless = fixed > max(distance, _MUCH * half)
    if not (final or is_hopeless):
        return None
    left = math.sqrt(max(0.0, distance**2 - fixed**2))
    needed = math.ceil(count * (half / left) ** 2) if half < left * math.sqrt(MANY / count) else MANY
    return Judgement("UNDECIDED", speedup, step, count, None if fixed > distance else max(needed, count + 1))


def needed(judged: Judgement) -> str:
    """How many pairs would decide, in words."""
    if judged.pairs_needed is None:
        return "no number of pairs would decide: steps to the target are too uncertain (tune.target_seeds, workload.eval_every)"
    number = f"more than {MANY:,}" if judged.pairs_needed >= MANY else f"about {judged.pairs_needed:,}"
    return f"{number} would decide, if mean and spread stay (tune.pairs)"


@functools.lru_cache(maxsize=64)
def critical_values(at: tuple[int, ...], shares: tuple[float, ...], error: float) -> tuple[float, ...]:
    """Of t at each look: normal ratios without a gain exceed those up to a look with a chance of its share of ``error``."""
    found: list[float] = []
    inside = np.ones(_DRAWS, dtype=bool)
    for row, look, share in zip(_paths(at), at, shares, strict=True):
        if not found:
            found.append(float(stats.t.ppf(1 - error * share, look - 1)))
        else:
            left = row[inside]
            beyond = max(round(error * share * _DRAWS) - (_DRAWS - len(left)), 1)
            found.append(float(np.partition(left, -beyond)[-beyond]))
        inside &= row < found[-1]
    return tuple(found)


@functools.lru_cache(maxsize=4)
def _paths(at: tuple[int, ...]) -> Floats:
    """Student's t of simulated normal ratios at the looks, shape ``(len(at), _DRAWS)``."""
    generator = np.random.default_rng(20_261_126)
    total, squares = np.zeros(_DRAWS), np.zeros(_DRAWS)
    rows = np.empty((len(at), _DRAWS))
    before = 0
    for row, look in zip(rows, at, strict=True):
        added = look - before
        more = generator.normal(0.0, math.sqrt(added), _DRAWS)
        squares += 2 * generator.standard_gamma((added - 1) / 2, _DRAWS)  # chi-square: squared deviations among those added
        if before:  # and those of the two means from the common one
            squares += (more / added - total / before) ** 2 * added * before / look
        total += more
        row[:] = total / np.sqrt(squares * look / (look - 1))
        before = look
    return rows
