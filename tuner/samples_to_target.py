"""Samples to the target by batch size: T(B) = S (1 + (B / B_crit)^q), with tuned learning rates.

With q = 1 it is the law of McCandlish et al. (arXiv 1812.06162). S has no prior; B_crit and q have one on a
grid. The measured points, and a gradient noise scale if known, which is about B_crit, weight the grid.
``reports/small_to_large`` compares it with MLPerf's reference points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetbench.experiment import ReferencePoint

Grid = npt.NDArray[np.float64]

B_CRIT = np.exp(np.linspace(math.log(0.05), math.log(300), 60))[:, None]
"""Grid of critical batch sizes, shape ``(60, 1)``, in units of the geometric mean of the points' batch sizes."""
POWERS = np.array([0.5, 0.75, 1.0, 1.25, 1.5])
POWER_PRIOR = np.array([0.1, 0.2, 0.4, 0.2, 0.1])
MISFIT = 0.04
"""Standard deviation of log T around the law at one batch size: each batch size's learning rate is tuned separately."""
TYPICAL, TYPICAL_SD = 12.0, 2.0
"""Median of B_crit's prior, in the unit of ``B_CRIT``, and the standard deviation of its logarithm. The median is above
1 because people measure at batches below B_crit."""
SEEDS = 0.04
"""Standard deviation of log T between seeds: the median of 22 benchmarks (mlcommons/logging, rcp_checker)."""
NOISE_SD = 1.2
"""Standard deviation of log B_crit around a noise scale measured at the start; noise scales grow as the loss
falls."""
LEVELS = (0.05, 0.5, 0.95)
_DRAWS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A measured gradient noise scale, in samples."""

    samples: float
    at_least: bool = False
    """Whether the scale is only a lower bound."""


def samples_to_target(points: Sequence[ReferencePoint], batch_size: float, noise: Noise | None = None) -> tuple[float, ...]:
    """Return the samples of one run to the target at a batch size: lower end, median and upper end (90 %).

    Args:
        points: at least one measured batch size, in any unit of samples, such as epochs.
        batch_size: samples per update, over all trainers.
        noise: the gradient noise scale, if a profile has measured it.
    """
    sizes = np.array([point.batch_size for point in points], float)[:, None, None]
    logs = np.log([point.samples for point in points])[:, None, None]
    unit = math.exp(np.log(sizes).mean())
    seeds = _seeds(points)
    variances = np.array([MISFIT**2 + seeds**2 / point.runs for point in points])[:, None, None]
    weights = 1 / variances
    rest = logs - _law(sizes / unit)
    scale = (rest * weights).sum(0) / weights.sum(0)
    likely = -0.5 * ((rest - scale) ** 2 * weights).sum(0) + np.log(POWER_PRIOR)
    likely = likely - 0.5 * (np.log(B_CRIT / TYPICAL) / TYPICAL_SD) ** 2
    if noise is not None:
        away = np.log(B_CRIT * unit / noise.samples)
        likely = likely - 0.5 * ((np.minimum(away, 0.0) if noise.at_least else away) / NOISE_SD) ** 2
    chance = np.exp(likely - likely.max()).ravel()
    random = np.random.default_rng(0)
    chosen = random.choice(chance.size, _DRAWS, p=chance / chance.sum())
    deviation = np.sqrt(1 / weights.sum(0).ravel() + MISFIT**2 + seeds**2)
    at = (scale + _law(np.array(batch_size / unit)[None, None, None])[0]).ravel()[chosen]
    return tuple(np.exp(np.quantile(at + deviation[0] * random.standard_normal(_DRAWS), LEVELS)).tolist())


def _law(batches: Grid) -> Grid:
    """Return log(1 + (B / B_crit)^q), shape (sizes, B_crit, q), for batches in the points' unit."""
    return np.asarray(np.log1p((batches / B_CRIT) ** POWERS))


def _seeds(points: Sequence[ReferencePoint]) -> float:
    """Return the standard deviation of log T between seeds: the mean of the points' median and ``SEEDS``."""
    own = [point.sd / point.samples for point in points if point.sd is not None]
    return 0.5 * float(np.median(own)) + 0.5 * SEEDS if own else SEEDS
