"""Bias: the simulator's error for a strategy relative to its error for the default, learnt from a few legs.

log(real / simulated) of a strategy, minus that of the default, is modelled as a sum: an effect of its family
(same arithmetic, rounded wire, other training), one effect for every parameter that differs from the
default's, and a residual. All are normal with mean 0. Predictions are averages over the standard deviations in
``SCALES``, weighted by how likely each makes the measurements. So a family's effect is the mean of its measured
errors, shrunk towards 0, and a prediction for a strategy that has not run has a standard deviation.
"""

import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from fleetbench.stragglers import Floats
from fleetbench.strategy import DistributedStrategy
from tuner.space import parameters_of

SCALES = (0.01, 0.04, 0.12, 0.35)
"""Possible standard deviations of a family's effect, in logarithms."""
PARAMETER = 0.5
"""Standard deviation of a parameter's effect, as a share of that of a family's effect."""
RESIDUAL, NOISE = 0.01, 0.02
"""Standard deviations, in logarithms: of a strategy's residual, and of the ratio of its two legs to two of the
default."""
LEAST = 0.002
"""Smallest expected gain, as a difference of log times, for which another strategy runs."""


def named(
    default: DistributedStrategy,
    measured: Mapping[DistributedStrategy, float],
    simulated: Mapping[DistributedStrategy, float],
    way: Callable[[DistributedStrategy], object] = lambda _: None,
    rejected: Container[DistributedStrategy] = (),
) -> DistributedStrategy | None:
    """Return the strategy to run next: the one with the largest expected gain among those that have not run.

    None if that gain is below ``LEAST``. ``measured`` and ``simulated`` are logarithms of times over the
    default's. A gain is relative to the best measured strategy with the same ``way`` of training, including
    the default; without one, to the best of all. ``rejected`` strategies are no baselines, but their errors
    count.
    """
    others = [strategy for strategy in simulated if strategy not in measured and strategy != default]
    if not others or not measured:
        return None
    best: dict[object, float] = {way(default): 0.0}
    for strategy, ratio in measured.items():
        if strategy not in rejected:
            best[way(strategy)] = min(ratio, best.get(way(strategy), math.inf))
    errors = {strategy: ratio - simulated[strategy] for strategy, ratio in measured.items()}
    mean, deviation = corrections(default, errors, others)
    bests = np.array([best.get(way(strategy), min(best.values())) for strategy in others])
    gains = improvement(bests, np.array([simulated[strategy] for strategy in others]) + mean, deviation)
    return others[int(gains.argmax())] if gains.max() >= LEAST else None


def corrections(
    default: DistributedStrategy, measured: Mapping[DistributedStrategy, float], others: Sequence[DistributedStrategy]
) -> tuple[Floats, Floats]:
    """Predict log(real / simulated) of ``others``, minus that of the default: mean and standard deviation.

    ``measured`` has this difference for strategies that have run. Shapes ``(len(others),)``.
    """
    errors = np.array([*measured.values()], dtype=np.float64)
    base, known, asked = (np.array([*map(_features, some)]) for some in ([default], [*measured], others))
    among_known, to_known, differs = _covariance(known, known, base), _covariance(asked, known, base), asked != base
    means, variances, weights = [], [], []
    for scale in SCALES:
        spread = np.array([scale, scale, *[PARAMETER * scale] * (base.shape[1] - 2)]) ** 2
        among = among_known @ spread + RESIDUAL**2 + np.eye(len(errors)) * (RESIDUAL**2 + NOISE**2)
        across = to_known @ spread + RESIDUAL**2
        alone = 2 * (differs @ spread) + 2 * RESIDUAL**2
        solved = np.linalg.solve(among, across.T)
        means.append(solved.T @ errors)
        variances.append(alone - (across * solved.T).sum(1))
        weights.append(stats.multivariate_normal.logpdf(errors, cov=among))
    shares = special.softmax(weights)
    mean = shares @ np.array(means)
    return mean, np.sqrt(shares @ (np.array(variances) + np.array(means) ** 2) - mean**2)


def improvement(best: Floats, mean: Floats, deviation: Floats) -> Floats:
    """Return the expected improvement over ``best`` of normal log times with this mean and deviation."""
    z = (best - mean) / deviation
    return np.asarray(deviation * (z * stats.norm.cdf(z) + stats.norm.pdf(z)))


def _covariance(some: npt.NDArray[np.str_], others: npt.NDArray[np.str_], base: npt.NDArray[np.str_]) -> Floats:
    """Return the covariance of effects minus the default's, in units of the variance of one effect.

    Shape ``(len(some), len(others), features)``. It is 0 where either strategy has the default's value.
    """
    differs = (some != base)[:, None] & (others != base)[None]
    return np.asarray(differs * (1.0 + (some[:, None] == others[None])))


@functools.lru_cache(maxsize=32_768)
def _features(strategy: DistributedStrategy) -> tuple[str, ...]:
    """Return two flags (local steps, 16-bit wire) and the parameters, with bucket sizes in powers of four."""
    found = parameters_of(strategy)
    if isinstance(size := found["fusion"], float):
        found["fusion"] = round(math.log2(max(size, 0.01)) / 2)
    return tuple(str(value) for value in (strategy.local_steps > 1, found["wire"] != "fp32", *found.values()))
