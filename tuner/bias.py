"""Bias: by how much the simulator errs for a strategy, beside what it errs for the default; learnt from legs of a few strategies.

log(real / simulated) of a strategy, less that of the default, is taken for a sum: an effect of its family (same arithmetic, rounded
wire, other training), one of every parameter that it has otherwise than the default, and a residual of its own. All are normal
about 0; how large they are is one of ``SCALES``, weighed by what was measured. So a family's effect is the mean of its residuals,
shrunk towards 0, and what few legs say of a strategy that did not run is said with a deviation.
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
"""Deviations of a family's effect, in logarithms."""
PARAMETER = 0.5
"""Deviation of the effect of one parameter's value, as a share of a family's."""
RESIDUAL, NOISE = 0.01, 0.02
"""Deviations of a strategy's own error, and of the ratio of two legs of it to two of the default."""
LEAST = 0.002
"""Expected gain, in logarithms, for which another strategy is worth its legs."""


def named(
    default: DistributedStrategy,
    measured: Mapping[DistributedStrategy, float],
    simulated: Mapping[DistributedStrategy, float],
    way: Callable[[DistributedStrategy], object] = lambda _: None,
    rejected: Container[DistributedStrategy] = (),
) -> DistributedStrategy | None:
    """The strategy that should run next: of those that did not, the one with the largest expected gain, if that is at least ``LEAST``.

    ``measured`` and ``simulated`` are logarithms of times over the default's. A gain is over the best that was measured of its ``way`` of
    training, the default among them; over the best of all, if none was. What is ``rejected`` tells of errors, and sets no bar.
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
    """Mean and deviation of log(real / simulated) of ``others``, less the default's; ``measured`` says it of some. Shapes ``(others,)``."""
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
    """Expected gain over ``best``, all in logarithms of times."""
    z = (best - mean) / deviation
    return np.asarray(deviation * (z * stats.norm.cdf(z) + stats.norm.pdf(z)))


def _covariance(some: npt.NDArray[np.str_], others: npt.NDArray[np.str_], base: npt.NDArray[np.str_]) -> Floats:
    """Of effects beside the default's, by feature, in units of one effect's variance: 0 where a feature is the default's."""
    differs = (some != base)[:, None] & (others != base)[None]
    return np.asarray(differs * (1.0 + (some[:, None] == others[None])))


@functools.lru_cache(maxsize=32_768)
def _features(strategy: DistributedStrategy) -> tuple[str, ...]:
    """The two families and the parameters; sizes of buckets are told apart by factors of four."""
    found = parameters_of(strategy)
    if isinstance(size := found["fusion"], float):
        found["fusion"] = round(math.log2(max(size, 0.01)) / 2)
    return tuple(str(value) for value in (strategy.local_steps > 1, found["wire"] != "fp32", *found.values()))
