"""Goodness of fit: how far measured times are from a fitted law, and how often the law itself would be as far from its own fit.

The parameters were fitted to the very times, so the tables of Kolmogorov and of Anderson and Darling
do not hold; a parametric bootstrap does (Stute, Gonzales Manteiga and Presedo Quindimil 1993): draw
from the fitted law, fit again, and compare distances.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetbench.fitting.laws import Fitted, fit_law

Floats = npt.NDArray[np.float64]

_DRAWS = 99
_MOST_TIMES = 400
"""More times than this are thinned out at random: the bootstrap fits them a hundred times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodness:
    """Distances with the shares of draws from the law itself that are as far; above 0.05 the law is not contradicted."""

    kolmogorov_smirnov: float
    kolmogorov_smirnov_p: float
    anderson_darling: float
    anderson_darling_p: float
    num_times: int


def goodness(times_s: Floats, fitted: Fitted, seed: int) -> Goodness:
    """Compare ``times_s`` with the law that was fitted to them."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 5]))
    times = np.asarray(times_s, dtype=float)
    if len(times) > _MOST_TIMES:
        times = generator.choice(times, _MOST_TIMES, replace=False)
        fitted = fit_law(fitted.law, times, fitted)
    measured = distances(times, fitted)
    farther = np.zeros(2)
    for _ in range(_DRAWS):
        drawn = fitted.quantile(generator.uniform(size=len(times)))
        farther += np.asarray(distances(drawn, fit_law(fitted.law, drawn, fitted))) >= np.asarray(measured)
    shares = (farther + 1.0) / (_DRAWS + 1)
    return Goodness(
        kolmogorov_smirnov=measured[0],
        kolmogorov_smirnov_p=float(shares[0]),
        anderson_darling=measured[1],
        anderson_darling_p=float(shares[1]),
        num_times=len(times),
    )


def distances(times_s: Floats, fitted: Fitted) -> tuple[float, float]:
    """Kolmogorov and Smirnov's D, and Anderson and Darling's A^2."""
    u = np.clip(fitted.cdf(np.sort(np.asarray(times_s, dtype=float))), 1e-12, 1.0 - 1e-12)
    n = len(u)
    rank = np.arange(1, n + 1)
    largest = float(max((rank / n - u).max(), (u - (rank - 1) / n).max()))
    squared = -n - float(((2 * rank - 1) * (np.log(u) + np.log1p(-u[::-1]))).sum()) / n
    return largest, squared
