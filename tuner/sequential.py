"""Sequential verdicts on pairs of runs: pairs stop at the first decisive look, without increasing the error.

At looks after 4, 6, 8, 12, 16, 24, 32, 48, ... pairs, Student's t of the log ratios decides, with critical
values under which all looks together have the requested error: a group-sequential t test (Jennison and
Turnbull 1991, Biometrika 78) whose error is spent by a function of the pairs (Lan and DeMets 1983, Biometrika
70), so that looks may end early. The critical values come from simulated normal ratios; t has no unit, so
they hold for every spread. A tuning that continues another one's pairs continues with the error that is left.
The interval is a repeated confidence interval (Jennison and Turnbull 1989, JRSS B 51): mean plus or minus
critical value times standard error. The intervals of all looks hold simultaneously, and so does the
interval of the look at which the pairs stop.

If the objective is the time to a target, a second factor comes from other runs: updates to the target
(``tuner.to_target``). The logarithms add up, and so do squared distances from the means to the ends of the
two intervals (MOVER: Zou and Donner 2008, Statistics in Medicine 27), separately on either side.
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
"""Least number of pairs for an interval."""
CONFIDENCE = 0.90
"""Confidence of the two-sided interval."""
ERROR = (1 - CONFIDENCE) / 2
"""Chance that the truth lies beyond either end of the interval, over all looks."""
FIRST_LOOK = 4
"""Number of pairs at the first look."""
_EARLY, _EARLY_PAIRS = 0.36, 8
"""Share of the error that the first eight pairs may spend. It was found with independent normal ratios, such
that half of the comparisons with a gain of 5 % and a deviation of 0.03 stop by then, and nine in ten with a
deviation of 0.06 within 48 pairs."""
_ENDING = 0.5
"""Share of the remaining error that a budget's last look takes. The rest is left for a larger budget."""
_FEW = 8
"""Largest number of pairs if there are too few runs to the target for USE."""
_BOTH = 0.9
"""Factor on the error when pairs and updates are judged together, because looks at their sum err 1.1 times as
often as allowed."""
_MUCH = 3.0
"""Ratio of the updates' half interval to the step's above which more pairs are futile, if the updates' interval alone
leaves the verdict open."""
_DRAWS = 500_000


@dataclass(frozen=True, slots=True)
class Speedup:
    """Ratio of the default's time to the finalist's, with the ends of its interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of_logs(cls, mean: float, below: float, above: float) -> Speedup:
        """Return the speed-up for a mean log ratio and the distances from it to the ends of its interval."""
        return cls(math.exp(mean), math.exp(mean - below), math.exp(mean + above))

    def __str__(self) -> str:
        return f"{self.mean:.3f}x [{self.low:.3f}, {self.high:.3f}]" if math.isfinite(self.high) else f"{self.mean:.3f}x, no interval"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of the pairs when they stop."""

    verdict: Literal["USE", "NO GAIN", "UNDECIDED"]
    """Verdict: USE if the interval is above ``1 + min_gain``, NO GAIN if it is below, UNDECIDED otherwise or with too
    few seeds for USE."""
    speedup: Speedup
    """Speed-up of the objective, which is the time per step or, with updates, the time to the target."""
    step: Speedup
    """Speed-up per step."""
    pairs: int
    """Number of pairs."""
    provable: float | None = None
    """For UNDECIDED: the smallest speed-up that would prove a gain after all pairs of the limit, given the remaining
    error and the spread so far. Infinite if the updates alone leave the verdict open, None if no look may follow."""


def paired_speedup(default_s: Sequence[float], finalist_s: Sequence[float], confidence: float = CONFIDENCE) -> Speedup:
    """Return Student's t interval of the mean of ``log(default_s[i] / finalist_s[i])``, as ratios of times.

    The number of pairs must have been fixed in advance. The legs of a pair run close together, so slowdowns
    of the machine cancel. Needs at least two pairs.
    """
    ratios = np.log(np.asarray(default_s, dtype=np.float64) / np.asarray(finalist_s, dtype=np.float64))
    assert len(ratios) >= LEAST_PAIRS, "an interval needs at least two pairs"
    half = float(stats.t.ppf((1 + confidence) / 2, len(ratios) - 1)) * float(stats.sem(ratios))
    return Speedup.of_logs(float(ratios.mean()), half, half)


def looks(limit: int) -> tuple[int, ...]:
    """Return the numbers of pairs at which looks are taken: 4, 6, 8, 12, 16, 24, ... and ``limit``."""
    doubled = sorted(first << k for first in (FIRST_LOOK, 3 * FIRST_LOOK // 2) for k in range(limit.bit_length()))
    return (*(number for number in doubled if number < limit), limit)


def spent(pairs: int, limit: int) -> float:
    """Return the share of the error that looks after up to ``pairs`` pairs may spend.

    ``_EARLY`` is spent by ``_EARLY_PAIRS``, the rest in proportion to the square of the pairs; 1 at ``limit``.
    """
    early = min(1.0, max(0, pairs - LEAST_PAIRS - 1) / (_EARLY_PAIRS - LEAST_PAIRS - 1)) ** 2
    return 1.0 if pairs >= limit else _EARLY * early + (1 - _EARLY) * (pairs / limit) ** 2


def planned(limit: int, ended: Sequence[int] = ()) -> dict[int, float]:
    """Return the cumulative share of the error that may be spent by each look, by its number of pairs.

    ``ended``: numbers of pairs at which a budget ended. The last look of a budget takes ``_ENDING`` of the
    remaining error. The looks of a larger budget share the rest as in ``spent``, so all looks of all budgets
    together spend no more than those of one tuning.
    """
    shares, before, gone = dict[int, float](), 0.0, 0.0
    for look in sorted({*looks(limit), *ended}):
        now = spent(look, limit)
        shares[look] = gone + (1 - gone) * (now - before) / (1 - before)
        if look in ended and look < limit:
            before, gone = now, shares[look] + _ENDING * (1 - shares[look])
            shares[look] = gone
    return shares


def gone(pairs: int, limit: int, ended: Sequence[int] = ()) -> float:
    """Return the share of the error that the looks after up to ``pairs`` pairs have spent."""
    return max((share for look, share in planned(limit, ended).items() if look <= pairs), default=0.0)


def judge(
    log_ratios: Sequence[float],
    min_gain: float,
    limit: int,
    *,
    error: float = ERROR,
    final: bool = False,
    updates: Updates | None = None,
    enough: bool = True,
    ended: Sequence[int] = (),
) -> Judgement | None:
    """Return the verdict on the pairs so far; None if more should run, or if they are too few for an interval.

    Args:
        log_ratios: logarithm of the default's time over the finalist's, per pair.
        min_gain: gain that USE has to exceed.
        limit: largest number of pairs.
        error: bound on the chance, over all looks, of USE if the gain is at most ``min_gain``. For NO GAIN if
            it is larger, the bound is ``ERROR``.
        final: whether a budget ends the pairs here, for a reason independent of the ratios.
        updates: updates to the target, if that is the objective and the finalist trains differently.
        enough: whether enough seeds ran to the target for USE. If not, at most ``_FEW`` pairs run.
        ended: numbers of pairs at which earlier budgets ended.
    """
    count, limit = len(log_ratios), limit if enough else min(limit, _FEW)
    shares = planned(limit, (*ended, count) if final else ended)
    final = final or count >= limit
    if count < LEAST_PAIRS or count not in shares:
        return None
    at = (*shares,)
    errors = [(1.0 if updates is None else _BOTH) * chance for chance in (error, ERROR)]
    below, above = (critical_values(at, (*shares.values(),), chance) for chance in errors)
    ratios, now = np.asarray(log_ratios, dtype=np.float64), at.index(count)
    mean, threshold = float(ratios.mean()), math.log1p(min_gain)
    deviation = float(ratios.std(ddof=1) * widening(ratios))
    low, high = (values[now] * deviation / math.sqrt(count) for values in (below, above))
    step = Speedup.of_logs(mean, low, high)
    fixed_low, fixed_high = (0.0, 0.0) if updates is None else (updates.half(errors[0], -1), updates.half(errors[1], 1))
    mean += 0.0 if updates is None else updates.mean
    speedup = Speedup.of_logs(mean, math.hypot(low, fixed_low), math.hypot(high, fixed_high))
    if enough and speedup.low > 1 + min_gain:
        return Judgement("USE", speedup, step, count)
    if speedup.high < 1 + min_gain:
        return Judgement("NO GAIN", speedup, step, count)
    half, fixed = (low, fixed_low) if mean > threshold else (high, fixed_high)
    is_open = fixed > abs(mean - threshold)
    if not (final or (is_open and fixed > _MUCH * half) or speedup.low > 1 + min_gain):
        return None
    if not enough or (count >= limit and not is_open):
        return Judgement("UNDECIDED", speedup, step, count)
    at_last = math.hypot(below[-1] * deviation / math.sqrt(limit), fixed_low)
    return Judgement("UNDECIDED", speedup, step, count, math.inf if is_open else math.exp(threshold + at_last))


def widening(log_ratios: Floats) -> Floats:
    """Return the factor by which autocorrelation of pairs widens the standard error, along the last axis.

    The ratios are modelled as a first-order autoregression with their lag-1 correlation ``r``. The mean of
    ``n`` ratios has the variance of one ratio times ``(1 + 2 sum_j (1 - j / n) r**j) / n``; the bias of the
    sample variance is corrected. Few pairs underestimate ``r`` (Marriott and Pope 1954, Biometrika 41), so
    ``(2 + 4 r) / n`` is added, slightly more than that bias, because the error rates require it
    (``reports/tuner``). Pairs with a negative correlation are treated as independent.
    """
    num = log_ratios.shape[-1]
    off = log_ratios - log_ratios.mean(-1, keepdims=True)
    squares = np.square(off).sum(-1)
    r = (off[..., 1:] * off[..., :-1]).sum(-1) / np.where(squares > 0, squares, 1.0)
    r = np.clip(r + (2 + 4 * np.clip(r, -0.3, 0.9)) / num, 0.0, 0.8)
    lags = np.arange(1, num)
    factor = 1 + 2 * ((1 - lags / num) * r[..., None] ** lags).sum(-1)
    return np.asarray(np.sqrt(factor * (num - 1) / np.maximum(num - factor, 0.1 * (num - 1))))


def outlook(judged: Judgement, limit: int) -> str | None:
    """Describe the gain that more pairs could prove; None if no look may follow."""
    if judged.provable is None:
        return None
    if math.isinf(judged.provable):
        return "no number of pairs would decide: steps to the target are too uncertain (tune.target_seeds, workload.eval_every)"
    gain = f"{100 * (judged.provable - 1):.2g} %"
    return f"--from goes on with the error that is left, up to {limit} pairs, which would prove a gain above {gain}"


@functools.lru_cache(maxsize=64)
def critical_values(at: tuple[int, ...], shares: tuple[float, ...], error: float) -> tuple[float, ...]:
    """Return the critical value of t at each look.

    With a chance of ``error * shares[i]``, normal ratios without a gain exceed a critical value by look ``i``,
    which is after ``at[i]`` pairs.
    """
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
    """Return Student's t of simulated normal ratios at the looks, shape ``(len(at), _DRAWS)``."""
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
