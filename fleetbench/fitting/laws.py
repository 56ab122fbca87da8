"""Laws: which law of X >= 0 explains measured times ``t = base (1 + X)``, and with which parameters.

The laws are those of ``fleetbench.stragglers``, by mean and coefficient of variation. The base, at X
= 0, is nobody's measurement, so it is fitted too. A density would grow without bound as the base
nears the smallest time; the chance of a cell of the timer's width cannot (Giesbrecht and Kempthorne
1976, "Maximum likelihood estimation in the three-parameter lognormal distribution").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special
from scipy.optimize import minimize

Floats = npt.NDArray[np.float64]
Law = Literal["exponential", "gamma", "lognormal", "pareto"]
LAWS: tuple[Law, ...] = ("exponential", "gamma", "lognormal", "pareto")

_NUM_PARAMETERS = {"exponential": 2, "gamma": 3, "lognormal": 3, "pareto": 3}
"""The base among them."""
_CELLS = 50.0
"""Cells in the middle half of the times."""
_NARROWEST, _WIDEST = 1e-6, 1e-3
"""Bounds of a cell, as a share of the median."""
_REACH, _DEEPEST = 0.5, 0.25
"""How far below the smallest time the base may lie: in distances from there to the median, and as a share of it."""
_TINY = 1e-300
_MOST_CV = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A law with its parameters."""

    law: Law
    base_s: float
    """The time at X = 0."""
    mean: float
    cv: float
    log_likelihood: float
    bic: float

    def cdf(self, t: Floats) -> Floats:
        """Probability of a time of at most ``t``."""
        return cdf(self.law, np.asarray(t) / self.base_s - 1.0, self.mean, self.cv)

    def quantile(self, u: Floats) -> Floats:
        """The time at probability ``u``."""
        return self.base_s * (1.0 + quantile(self.law, u, self.mean, self.cv))


def cdf(law: Law, x: Floats, mean: float, cv: float) -> Floats:
    """P(X <= x), exact where it is small."""
    x = np.maximum(np.asarray(x, dtype=float), 0.0)
    if law == "exponential":
        return -np.expm1(-x / mean)
    if law == "gamma":
        shape = 1.0 / cv**2
        return np.asarray(special.gammainc(shape, x * shape / mean))
    if law == "lognormal":
        return np.asarray(special.ndtr(_normal(x, mean, cv)))
    return -np.expm1(_log_above(x, mean, cv))


def survival(law: Law, x: Floats, mean: float, cv: float) -> Floats:
    """P(X > x), exact where it is small."""
    x = np.maximum(np.asarray(x, dtype=float), 0.0)
    if law == "exponential":
        return np.exp(-x / mean)
    if law == "gamma":
        shape = 1.0 / cv**2
        return np.asarray(special.gammaincc(shape, x * shape / mean))
    if law == "lognormal":
        return np.asarray(special.ndtr(-_normal(x, mean, cv)))
    return np.exp(_log_above(x, mean, cv))


def _normal(x: Floats, mean: float, cv: float) -> Floats:
    """The standard normal number behind a lognormal one."""
    sigma = math.sqrt(math.log1p(cv**2))
    with np.errstate(divide="ignore"):
        return np.asarray((np.log(x / mean) + sigma**2 / 2) / sigma)


def _log_above(x: Floats, mean: float, cv: float) -> Floats:
    """Logarithm of P(X > x) for a Pareto II law."""
    alpha = _alpha(cv)
    return np.asarray(-alpha * np.log1p(x / (mean * (alpha - 1))))


def quantile(law: Law, u: Floats, mean: float, cv: float) -> Floats:
    """X at probability ``u``."""
    u = np.asarray(u, dtype=float)
    if law == "exponential":
        return np.asarray(-mean * np.log1p(-u))
    if law == "gamma":
        shape = 1.0 / cv**2
        return np.asarray(special.gammaincinv(shape, u) * mean / shape)
    if law == "lognormal":
        sigma = math.sqrt(math.log1p(cv**2))
        return np.asarray(mean * np.exp(sigma * special.ndtri(u) - sigma**2 / 2))
    alpha = _alpha(cv)
    return np.asarray(mean * (alpha - 1) * np.expm1(-np.log1p(-u) / alpha))


def _alpha(cv: float) -> float:
    """The exponent of a Pareto II (Lomax) law: cv^2 = alpha / (alpha - 2)."""
    return 2 * cv**2 / (cv**2 - 1)


def fit_law(law: Law, times_s: Floats, start: Fitted | None = None) -> Fitted:
    """The most likely parameters of one law; from ``start``, where they are about known, by a shorter search."""
    times = np.asarray(times_s, dtype=float)
    middle = float(np.median(times))
    scaled = times / middle
    search = _Search(law, scaled)
    starts = [search.encode(start.base_s / middle, start.mean, start.cv)] if start is not None else search.guesses()
    exact = 1e-4 if start is None else 1e-2
    options = {"xatol": exact, "fatol": exact, "maxiter": 600}
    fits = [minimize(search.cost, guess, method="Nelder-Mead", options=options) for guess in starts]
    best = min(fits, key=lambda fit: float(fit.fun))
    base, mean, cv = search.decode(best.x)
    likelihood = -float(best.fun)
    bic = _NUM_PARAMETERS[law] * math.log(len(times)) - 2 * likelihood
    return Fitted(law=law, base_s=base * middle, mean=mean, cv=cv, log_likelihood=likelihood, bic=bic)


def choose_law(times_s: Floats, laws: Sequence[Law] = LAWS) -> tuple[Fitted, dict[str, float]]:
    """The law with the smallest Bayesian information criterion, and by how much those of all exceed it."""
    fits = sorted((fit_law(law, times_s) for law in laws), key=lambda fit: fit.bic)
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
        low = (self._times - self._width / 2) / base - 1.0
        high = (self._times + self._width / 2) / base - 1.0
        below = cdf(self._law, low, mean, cv)
        cell = cdf(self._law, high, mean, cv) - below
        far = below > 0.5
        cell[far] = survival(self._law, low[far], mean, cv) - survival(self._law, high[far], mean, cv)
        return -float(np.log(np.maximum(cell, _TINY)).sum())
