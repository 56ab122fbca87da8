"""Uncertainty: how far a simulated speed-up may be from the one that would be measured.

Up to four independent parts add in quadrature: draws of stragglers, the simulator's own error, the error of
estimated compute, and the spread of the steps to the target. Each is the half-width of a two-sided 90 %
interval of the logarithm of the speed-up.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from fleetbench.config import Config
from fleetbench.experiment import Experiment
from fleetbench.quantities import BitsPerSecond

CONFIDENCE = 0.90
MODEL_ERROR = 0.083
"""Error of the predicted log ratio of step times that 90 % of 28 pairs of strategies in declared clusters do
not exceed (reports/network)."""
FIRST_LOOK_ERROR = 0.068
"""Like ``MODEL_ERROR``, for 254 pairs in environments that had not been run before (reports/fidelity). Its square
is added once for each of the ``ways_outside``."""
MEASURED_TRAINERS = 4
MEASURED_BANDWIDTH = BitsPerSecond(200 * 10**6)
"""Largest number of trainers, and bandwidth of the fastest links, that the simulator was compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Config):
    """Parts of the uncertainty of a speed-up, as half-widths of the interval of its logarithm."""

    seeds: float
    model: float
    estimate_low: float = 0.0
    """Half-width below the speed-up, from estimated compute; above it: ``estimate_high``."""
    estimate_high: float = 0.0
    updates_low: float = 0.0
    """Half-width below the speed-up to a target, from the spread of its steps; above it: ``updates_high``."""
    updates_high: float = 0.0

    def interval(self, speedup: float) -> tuple[float, float]:
        """Return the ends of the interval around a speed-up."""
        low = math.hypot(self.seeds, self.model, self.estimate_low, self.updates_low)
        high = math.hypot(self.seeds, self.model, self.estimate_high, self.updates_high)
        return speedup * math.exp(-low), speedup * math.exp(high)


def spread_of(ratios: Sequence[float], outside: Sequence[str], ends: Sequence[float] = ()) -> Spread:
    """Return the parts of the uncertainty of one speed-up.

    Args:
        ratios: speed-up with each seed. In 90 % of cases, another seed's logarithm lies within t(n - 1) sd
            sqrt(1 + 1/n) of the mean of their logarithms.
        outside: ``ways_outside``.
        ends: speed-up at both ends of the estimated compute times.
    """
    logs = [math.log(ratio) for ratio in ratios]
    seeds = 0.0
    if len(logs) > 1:
        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1))
        seeds = quantile * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    away = [math.log(end) - statistics.fmean(logs) for end in ends]
    return Spread(
        seeds=seeds,
        model=math.sqrt(MODEL_ERROR**2 + len(outside) * FIRST_LOOK_ERROR**2),
        estimate_low=max(0.0, *(-value for value in away)) if away else 0.0,
        estimate_high=max(0.0, *away) if away else 0.0,
    )


def ways_outside(experiment: Experiment) -> tuple[str, ...]:
    """Return the ways in which the experiment lies outside of what was measured.

    Compute was emulated, and gloo used shaped links.
    """
    cluster, run = experiment.cluster, experiment.run
    fast = [link for link in (cluster.intra, cluster.inter) if link is not None and link.bandwidth > MEASURED_BANDWIDTH]
    ways = (
        (f"more than {MEASURED_TRAINERS} trainers", cluster.trainers > MEASURED_TRAINERS),
        ("links faster than 200 Mbit/s", bool(fast)),
        ("GPUs or NCCL", cluster.gpu is not None or run.device == "cuda" or experiment.transport == "nccl"),
        ("parameter servers", experiment.strategy.mode == "ps"),
    )
    return tuple(name for name, is_outside in ways if is_outside)
