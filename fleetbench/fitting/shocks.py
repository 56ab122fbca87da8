"""Shocks: what ranks have in common in a step, told apart from what each has by itself, and the law that explains it.

Two ways of one sum of squares: the logarithm of a rank's step time is a step's own part plus a rank's
own part, independent of each other. The mean over n ranks holds the step's part and one n-th of the
variance of a rank's; what is left over holds (n - 1) / n of that (Searle, Casella and McCulloch 1992,
"Variance Components", section 3.3), and is put right by a factor.

A step's part is seen as the mean of n ranks' logarithms, y = log base + log(1 + X) + noise, where the noise is what
the ranks' own jitter leaves of itself in a mean: normal, of known spread. With a share ``rate`` of steps that are
hit, the density of y is a mixture of the noise's at log base and of the law's blurred by it, for which noise of the
same variance, but equally likely within its bounds, leaves a difference of the law's probabilities. A law that hits
every step has one number fewer; the Bayesian information criterion decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from fleetbench.fitting.distributions import Fitted, Law, cells, most_likely
from fleetbench.stragglers import Floats, Integers

LAWS: tuple[Law, ...] = ("constant", "exponential", "gamma", "lognormal")

_SMALLEST_NOISE = 0.02
"""As a share of the spread of y."""
_REACH = 0.5
"""How far below the smallest y the base of a law that hits every step may lie, in distances from there to the median."""
_STARTS = (0.15, 0.4, 0.7)
"""Shares of steps that are not hit, to search from."""
_LEAST_HITS, _MOST_HITS = 0.02, 0.98
_MOST_CV = 5.0
_TINY = 1e-300
TOGETHER = 0.3
"""Ranks whose steps correlate more than this are slow together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Factors whose product is a step's time."""

    common: Floats
    """Logarithms of seconds, by group and step, as the mean over the group's ranks has them."""
    noise: float
    """Standard deviation of what the ranks' own parts leave in it."""
    own: Floats
    """Around 1, by rank and step."""


def split_shared(level_s: Floats, groups: Sequence[Integers]) -> Shared:
    """Take times by rank and step apart; ``groups`` are the ranks that share, at least two in each."""
    logs = np.log(np.asarray(level_s, dtype=float))
    commons, own, variances = [], np.zeros_like(logs), []
    for ranks in groups:
        mean = logs[ranks].mean(axis=0)
        rest = logs[ranks] - mean
        size, steps = rest.shape
        commons.append(mean)
        own[ranks] = np.exp(rest * math.sqrt(size / (size - 1)))
        variances.append(float((rest**2).sum()) / (steps * (size - 1)) / size)
    return Shared(common=np.array(commons), noise=math.sqrt(float(np.mean(variances))), own=own)


def correlation(level_s: Floats, pairs: npt.NDArray[np.bool_] | None = None) -> float | None:
    """Mean correlation between two ranks, by the order of their steps' times, so that single slow steps do not decide.

    ``pairs`` says by rank and rank which to look at; default: all. None where there is no pair, or a rank's steps are constant.
    """
    ranks = len(level_s)
    upper = np.triu(np.ones((ranks, ranks), dtype=bool), 1)
    chosen = upper if pairs is None else upper & pairs
    if not chosen.any() or np.ptp(level_s, axis=1).min() == 0.0:
        return None
    found = np.atleast_2d(np.corrcoef(stats.rankdata(level_s, axis=1)))
    return float(found[chosen].mean())


def groups_of(level_s: Floats, nodes: Sequence[int]) -> list[Integers]:
    """Who is slow together: all ranks as one group, those of each node, or no rank; ``nodes`` has each rank's."""
    node = np.asarray(nodes)
    same = node[:, None] == node[None, :]
    between, within = correlation(level_s, ~same), correlation(level_s, same)
    if between is not None and between > TOGETHER:
        return [np.arange(len(node))]
    if within is None or within <= TOGETHER:
        return []
    groups = [np.flatnonzero(node == number) for number in np.unique(node)]
    return groups if min(map(len, groups)) > 1 else []


def choose_shock(common: Floats, noise: float) -> tuple[Fitted, dict[str, float]]:
    """The law of steps' means ``common``, logarithms of seconds, with the smallest criterion, and by how much all exceed it."""
    fits = [fit_shock(law, common, noise, always=always) for law in LAWS for always in (True, False) if law != "constant" or not always]
    fits.sort(key=lambda fit: fit.bic)
    return fits[0], {f"{fit.law}{'' if fit.always else ', at times'}": fit.bic - fits[0].bic for fit in fits}


def fit_shock(law: Law, common: Floats, noise: float, *, always: bool, start: Fitted | None = None) -> Fitted:
    """The most likely parameters of one law; from ``start``, where they are about known, by a shorter search."""
    search = _Search(law, np.asarray(common, dtype=float), noise, always=always)
    begin = None if start is None else search.encode(math.log(start.base_s), start.rate, start.mean, start.cv)
    numbers, bic = most_likely(search.cost, search.guesses(), begin, len(common))
    base, rate, mean, cv = search.decode(numbers)
    return Fitted(law=law, base_s=math.exp(base), rate=rate, mean=mean, cv=cv, bic=bic)


class _Search:
    """Free numbers for one law's parameters: the base's logarithm, log mean, log cv where it has one, and the share's logit."""

    def __init__(self, law: Law, common: Floats, noise: float, *, always: bool) -> None:
        self._law = law
        self._always = always
        self._y = np.sort(common)
        self._noise = max(noise, _SMALLEST_NOISE * float(common.std()), 1e-9)
        self._has_cv = law in ("gamma", "lognormal")
        low, middle = float(common.min()), float(np.median(common))
        self._lowest = low - _REACH * (middle - low) - 2 * self._noise

    def guesses(self) -> list[list[float]]:
        """Where to search from."""
        y = self._y
        if self._always:
            bases = [float(y[0]) - share * (float(np.median(y)) - float(y[0])) for share in (0.05, 0.4)]
            return [self.encode(base, 1.0, *_moments(np.expm1(y - base))) for base in bases]
        found = []
        for share in _STARTS:
            cut = min(max(round(share * len(y)), 1), len(y) - 1)
            base = float(y[:cut].mean())
            found.append(self.encode(base, 1.0 - share, *_moments(np.expm1(y[cut:] - base))))
        return found

    def encode(self, base: float, rate: float, mean: float, cv: float) -> list[float]:
        numbers = [base, math.log(max(mean, 1e-9))]
        if self._has_cv:
            numbers.append(math.log(min(max(cv, 1e-3), _MOST_CV)))
        if not self._always:
            numbers.append(float(special.logit(min(max(rate, _LEAST_HITS), _MOST_HITS))))
        return numbers

    def decode(self, numbers: Sequence[float]) -> tuple[float, float, float, float]:
        base, mean = max(numbers[0], self._lowest), math.exp(min(max(numbers[1], -30.0), 10.0))
        cv = {"constant": 0.0, "exponential": 1.0}.get(self._law, 0.0)
        if self._has_cv:
            cv = min(max(math.exp(min(numbers[2], 10.0)), 1e-3), _MOST_CV)
        rate = 1.0 if self._always else min(max(float(special.expit(numbers[-1])), _LEAST_HITS), _MOST_HITS)
        return base, rate, mean, cv

    def cost(self, numbers: Sequence[float]) -> float:
        """Minus the log-likelihood."""
        base, rate, mean, cv = self.decode(numbers)
        away = self._y - base
        density = rate * self._blurred(away, mean, cv) + (1.0 - rate) * _normal(away / self._noise) / self._noise
        return -float(np.log(np.maximum(density, _TINY)).sum())

    def _blurred(self, away: Floats, mean: float, cv: float) -> Floats:
        """The density of log(1 + X) and noise."""
        if self._law == "constant":
            return _normal((away - math.log1p(mean)) / self._noise) / self._noise
        half = math.sqrt(3.0) * self._noise
        return cells(self._law, np.expm1([away - half, away + half]), mean, cv) / (2 * half)


def _moments(x: Floats) -> tuple[float, float]:
    mean = max(float(x.mean()), 1e-6)
    return mean, max(float(x.std()) / mean, 0.05)


def _normal(z: Floats) -> Floats:
    return np.asarray(np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))
