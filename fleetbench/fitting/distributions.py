"""Laws: which law of X >= 0 explains measured times ``t = base (1 + X)``, with which parameters, and how well.

The laws are those of ``fleetbench.stragglers``, by mean and coefficient of variation. No sample measures
the base, X = 0, so it is fitted too. A density would grow without bound as the base
nears the smallest time; the chance of a cell of the timer's width cannot (Giesbrecht and Kempthorne
1976, "Maximum likelihood estimation in the three-parameter lognormal distribution").

How well: the parameters were fitted to the very times, so the tables of Kolmogorov and of Anderson and Darling
do not hold; a parametric bootstrap does (Stute, Gonzales Manteiga and Presedo Quindimil 1993): draw
from the fitted law, fit again, and compare distances, until enough were as far (Besag and Clifford 1991,
"Sequential Monte Carlo p-values").
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special
from scipy.optimize import OptimizeResult, minimize

from fleetbench.stragglers import Distribution, Floats, quantile

Law = Distribution
LAWS: tuple[Law, ...] = ("exponential", "gamma", "lognormal", "pareto")

_CELLS = 50.0
"""Cells in the middle half of the times."""
_NARROWEST, _WIDEST = 1e-6, 1e-3
"""Bounds of a cell, as a share of the median."""
_REACH, _DEEPEST = 0.5, 0.25
"""How far below the smallest time the base may lie: in distances from there to the median, and as a share of it."""
_TINY = 1e-300
_MOST_CV = 20.0
_STEP = 0.2
"""Of the first simplex of a search, in the logarithms and logits that it varies."""
_DRAWS = 99
_ENOUGH = 10
"""Draws that are as far: a share of at least a tenth is known by then."""
_MOST_TIMES = 400
"""More times than this are thinned out at random: the bootstrap fits them a hundred times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A law with its parameters. ``rate`` is the share of steps that it hits; jitter hits all."""

    law: Law
    base_s: float
    """The time at X = 0."""
    mean: float
    cv: float
    bic: float
    rate: float = 1.0

    def cdf(self, t: Floats) -> Floats:
        """Probability of a time of at most ``t``, where every step is hit."""
        return chance(self.law, np.asarray(t) / self.base_s - 1.0, self.mean, self.cv)

    def quantile(self, u: Floats) -> Floats:
        """The time at probability ``u``."""
        hit = np.clip((np.asarray(u, dtype=float) - (1.0 - self.rate)) / self.rate, 0.0, 1.0 - 1e-12)
        return self.base_s * (1.0 + np.where(hit > 0, quantile(self.law, hit, self.mean, self.cv), 0.0))

    @property
    def always(self) -> bool:
        """Whether it hits every step."""
        return self.rate == 1.0


def chance(law: Law, x: Floats, mean: float, cv: float, *, above: bool = False) -> Floats:
    """P(X <= x), or ``above`` it P(X > x); each exact where it is small.

    scipy's special functions, because its distributions take ten times as long to check their arguments as to compute.
    """
    x = np.maximum(np.asarray(x, dtype=float), 0.0)
    if law == "gamma":
        shape = 1.0 / cv**2
        return np.asarray((special.gammaincc if above else special.gammainc)(shape, x * shape / mean))
    if law == "lognormal":
        sigma = math.sqrt(math.log1p(cv**2))
        with np.errstate(divide="ignore"):
            normal = (np.log(x / mean) + sigma**2 / 2) / sigma
        return np.asarray(special.ndtr(-normal if above else normal))
    log_above = -x / mean if law == "exponential" else -_alpha(cv) * np.log1p(x / (mean * (_alpha(cv) - 1)))
    return np.asarray(np.exp(log_above) if above else -np.expm1(log_above))


def cells(law: Law, bounds: Floats, mean: float, cv: float) -> Floats:
    """The chance of each cell; ``bounds`` are the lower and the upper ones ``(2, cells)``, in rising order.

    Differences of P(X <= x) in the first half, and of P(X > x) after it, so that both tails are exact.
    """
    half = bounds.shape[1] // 2
    low, high = (
        np.diff(chance(law, part, mean, cv, above=above), axis=0)[0]
        for part, above in ((bounds[:, :half], False), (bounds[:, half:], True))
    )
    return np.concatenate([low, -high])


def _alpha(cv: float) -> float:
    """The exponent of a Pareto II (Lomax) law: cv^2 = alpha / (alpha - 2)."""
    return 2 * cv**2 / (cv**2 - 1)


def fit_law(law: Law, times_s: Floats, start: Fitted | None = None) -> Fitted:
    """The most likely parameters of one law; from ``start``, where they are about known, by a shorter search."""
    times = np.asarray(times_s, dtype=float)
    middle = float(np.median(times))
    scaled = times / middle
    search = _Search(law, scaled)
    begin = None if start is None else search.encode(start.base_s / middle, start.mean, start.cv)
    numbers, bic = most_likely(search.cost, search.guesses(), begin, len(times))
    base, mean, cv = search.decode(numbers)
    return Fitted(law=law, base_s=base * middle, mean=mean, cv=cv, bic=bic)


def most_likely(
    cost: Callable[[Sequence[float]], float], guesses: Sequence[Sequence[float]], start: Sequence[float] | None, num: int
) -> tuple[Sequence[float], float]:
    """The numbers of the least ``cost``, minus a log-likelihood of ``num`` times, and their Bayesian information criterion.

    From the best of all guesses, or by a shorter search from ``start``.
    """

    def climb(begin: Sequence[float], exact: float) -> OptimizeResult:
        simplex = np.asarray(begin) + _STEP * np.eye(len(begin) + 1, len(begin), -1)
        options = {"xatol": exact, "fatol": exact, "maxiter": 800, "initial_simplex": simplex}
        return minimize(cost, begin, method="Nelder-Mead", options=options)

    if start is None:
        roughly = min((climb(guess, 0.1) for guess in guesses), key=lambda found: float(found.fun))
        best = climb(roughly.x, 1e-4)
    else:
        best = climb(start, 1e-2)
    return best.x, len(best.x) * math.log(num) + 2 * float(best.fun)


def choose_law(times_s: Floats) -> tuple[Fitted, dict[str, float]]:
    """The law with the smallest Bayesian information criterion, and by how much those of all exceed it."""
    fits = sorted((fit_law(law, times_s) for law in LAWS), key=lambda fit: fit.bic)
    return fits[0], {fit.law: fit.bic - fits[0].bic for fit in fits}


class _Search:
    """Free numbers for one law's parameters: log mean, the base's distance below the smallest time, and log cv."""

    def __init__(self, law: Law, times: Floats) -> None:
        self._law = law
        low, q25, q75 = (float(value) for value in (times.min(), *np.quantile(times, (0.25, 0.75))))
        self._width = min(max((q75 - q25) / _CELLS, _NARROWEST), _WIDEST)
        self._top = low + self._width / 2
        self._reach = min(max(_REACH * (1.0 - low), self._width), _DEEPEST * self._top)
        self._times = times
        self._bounds = np.sort(times) + self._width / 2 * np.array([[-1.0], [1.0]])

    def guesses(self) -> list[list[float]]:
        """Where to search from: several bases, with the moments that X then has."""
        found = []
        for share in (0.01, 0.1, 0.5):
            base = self._top - share * self._reach
            x = self._times / base - 1.0
            mean = max(float(x.mean()), 1e-9)
            found.append(self.encode(base, mean, max(float(x.std()) / mean, 1e-3)))
        return found

    def encode(self, base: float, mean: float, cv: float) -> list[float]:
        share = min(max((self._top - base) / self._reach, 1e-6), 1.0 - 1e-6)
        numbers = [math.log(mean), math.log(share / (1.0 - share))]
        if self._law == "pareto":
            return [*numbers, math.log(max(cv, 1.001) - 1.0)]
        return numbers if self._law == "exponential" else [*numbers, math.log(cv)]

    def decode(self, numbers: Sequence[float]) -> tuple[float, float, float]:
        mean = math.exp(min(max(numbers[0], -30.0), 13.0))
        base = self._top - self._reach * float(special.expit(numbers[1]))
        if self._law == "exponential":
            return base, mean, 1.0
        spread = math.exp(min(max(numbers[2], -12.0), math.log(_MOST_CV)))
        return base, mean, 1.0 + spread if self._law == "pareto" else spread

    def cost(self, numbers: Sequence[float]) -> float:
        """Minus the log-likelihood of the times' cells."""
        base, mean, cv = self.decode(numbers)
        return -float(np.log(np.maximum(cells(self._law, self._bounds / base - 1.0, mean, cv), _TINY)).sum())


def goodness(times_s: Floats, fitted: Fitted, seed: int) -> dict[str, float]:
    """Compare ``times_s`` with the law that was fitted to them: both ``distances``, each with its p, by the names of ``JitterFit``.

    A p is the share of draws from the law itself that are as far; above 0.05 the law is not contradicted.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 5]))
    times = np.asarray(times_s, dtype=float)
    if len(times) > _MOST_TIMES:
        times = generator.choice(times, _MOST_TIMES, replace=False)
        fitted = fit_law(fitted.law, times, fitted)
    measured = np.asarray(distances(times, fitted))
    farther, draws, goes_on = np.zeros(2), np.zeros(2), np.ones(2, dtype=bool)
    while goes_on.any() and draws.max() < _DRAWS:
        drawn = fitted.quantile(generator.uniform(size=len(times)))
        farther += goes_on & (np.asarray(distances(drawn, fit_law(fitted.law, drawn, fitted))) >= measured)
        draws += goes_on
        goes_on = farther < _ENOUGH
    shares = np.where(goes_on, (farther + 1) / (draws + 1), farther / draws)
    return {
        "kolmogorov_smirnov": round(float(measured[0]), 5),
        "kolmogorov_smirnov_p": float(shares[0]),
        "anderson_darling": round(float(measured[1]), 4),
        "anderson_darling_p": float(shares[1]),
    }


def distances(times_s: Floats, fitted: Fitted) -> tuple[float, float]:
    """Kolmogorov and Smirnov's D, and Anderson and Darling's A^2."""
    u = np.clip(fitted.cdf(np.sort(np.asarray(times_s, dtype=float))), 1e-12, 1.0 - 1e-12)
    n = len(u)
    rank = np.arange(1, n + 1)
    largest = float(max((rank / n - u).max(), (u - (rank - 1) / n).max()))
    squared = -n - float(((2 * rank - 1) * (np.log(u) + np.log1p(-u[::-1]))).sum()) / n
    return largest, squared
