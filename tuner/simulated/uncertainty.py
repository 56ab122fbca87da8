"""Uncertainty: how far a simulated speed-up may be from the one that would be measured.

Three parts, of independent causes, in logarithms of the speed-up, each a half-width of a two-sided 90 % interval; they add
in quadrature: the draws of stragglers, the simulator's own error, and the error of estimated compute.
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
"""Of 28 pairs of strategies in declared clusters (reports/network) 90 % have a log-ratio of step times predicted within this."""
FIRST_LOOK_ERROR = 0.068
"""The same of 254 pairs in environments not run before (reports/fidelity): added for each way out of what was measured."""
MEASURED_TRAINERS = 4
MEASURED_BANDWIDTH = BitsPerSecond(200 * 10**6)
"""The most trainers, and the fastest links, of that grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Config):
    """Half-widths, as shares."""

    seeds: float
    model: float
    estimate_low: float = 0.0
    """Below the speed-up; above it: ``estimate_high``."""
    estimate_high: float = 0.0
    updates_low: float = 0.0
    """Of the speed-up to a target: its steps, by seed."""
    updates_high: float = 0.0

    def interval(self, speedup: float) -> tuple[float, float]:
        """The ends around a speed-up."""
        low = math.hypot(self.seeds, self.model, self.estimate_low, self.updates_low)
        high = math.hypot(self.seeds, self.model, self.estimate_high, self.updates_high)
        return speedup * math.exp(-low), speedup * math.exp(high)


def spread_of(ratios: Sequence[float], outside: Sequence[str], ends: Sequence[float] = ()) -> Spread:
    """The parts of one speed-up's uncertainty.

    Args:
        ratios: the speed-up under each seed; another seed's lies within t(n - 1) sd sqrt(1 + 1/n) of their mean in 90 % of cases.
        outside: ways in which the experiment lies outside of what was measured.
        ends: the speed-up at both ends of the estimated compute times.
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
    """In which ways the experiment lies outside of what was measured: emulated compute, gloo over shaped links."""
    cluster, run = experiment.cluster, experiment.run
    fast = [link for link in (cluster.intra, cluster.inter) if link is not None and link.bandwidth > MEASURED_BANDWIDTH]
    ways = (
        (f"more than {MEASURED_TRAINERS} trainers", cluster.trainers > MEASURED_TRAINERS),
        ("links faster than 200 Mbit/s", bool(fast)),
        ("GPUs or NCCL", cluster.gpu is not None or run.device == "cuda" or experiment.transport == "nccl"),
        ("parameter servers", experiment.strategy.mode == "ps"),
    )
    return tuple(name for name, is_outside in ways if is_outside)
