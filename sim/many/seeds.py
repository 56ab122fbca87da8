"""seeds: how much the figures of a summary depend on the seed.

The experiment is simulated under several consecutive seeds, starting with its own. Each figure of the
summary is then a sample of independent numbers, whose mean gets a confidence interval by Student's t.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fleetbench.config import flat
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import Summary
from fleetbench.target import median_arrival
from sim.learning.trajectory import Learn
from sim.many.pool import Job, Where, started, summaries
from sim.many.training import trained
from sim.run import Engine

CONFIDENCE = 0.95
MOST_SEEDS = 100_000
_FIGURES = """
wall_s samples_per_s step_s.mean step_s.p50 step_s.p95 step_s.p99 compute_s wait_s exposed_comm_s update_s other_s time_to_target_s
final_loss per_trainer.samples_per_s per_trainer.tokens_per_s per_trainer.mfu
"""
FIGURES = tuple(_FIGURES.split())
"""Names of the figures that get an interval; ``step_s.p95`` is a key within ``step_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over seeds with its confidence interval, and the standard deviation between seeds."""

    mean: float
    low: float
    high: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
        """Return the interval mean +- t(n - 1) std / sqrt(n) of at least two values; of one value, without width."""
        if len(values) == 1:
            return cls(mean=values[0], low=values[0], high=values[0], std=0.0)
        from scipy import stats

        mean, std = statistics.fmean(values), statistics.stdev(values)
        half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * std / math.sqrt(len(values))
        return cls(mean=mean, low=mean - half, high=mean + half, std=std)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSeeds:
    """Summaries of one experiment under several seeds."""

    experiment: Experiment
    seeds: tuple[int, ...]
    summaries: tuple[Summary, ...]

    @property
    def intervals(self) -> dict[str, Interval]:
        """Intervals of all figures that every run has, by name."""
        figures = [dict(flat(dataclasses.asdict(summary))) for summary in self.summaries]
        values = {name: [figure.get(name) for figure in figures] for name in FIGURES}
        return {name: Interval.of([value for value in found if value is not None]) for name, found in values.items() if None not in found}

    @property
    def num_reached(self) -> int:
        """Number of runs that reached the target."""
        return sum(summary.time_to_target_s is not None for summary in self.summaries)

    @property
    def median_to_target_s(self) -> float | None:
        """Seconds after which half of the runs have reached the target; ``None`` if fewer do.

        Runs that miss it are censored.
        """
        return median_arrival([summary.time_to_target_s for summary in self.summaries])

    def to_dict(self) -> dict[str, Any]:
        """Return the intervals and every run's summary as plain data."""
        first = self.summaries[0]
        return {
            "name": first.name,
            "trainers": first.trainers,
            "steps": first.steps,
            "seeds": list(self.seeds),
            "confidence": CONFIDENCE,
            "num_reached": self.num_reached,
            "median_to_target_s": self.median_to_target_s,
            "intervals": {name: dataclasses.asdict(interval) for name, interval in self.intervals.items()},
            "summaries": [dataclasses.asdict(summary) for summary in self.summaries],
        }


def check_number(num_seeds: int) -> None:
    """Raise ``ConfigError`` for fewer than 2 seeds, which give no interval, or more than ``MOST_SEEDS``."""
    if num_seeds > MOST_SEEDS:
        raise ConfigError(f"has more than {MOST_SEEDS:,} seeds", "--seeds", f"{num_seeds:,}", "for example --seeds 10")
    if num_seeds < 2:
        raise ConfigError("an interval needs at least 2 seeds", "--seeds", repr(num_seeds), "for example --seeds 10")


def over_seeds(
    experiment: Experiment,
    num_seeds: int,
    *,
    engine: Engine = "auto",
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    learn: Learn | None = None,
    on: Where = "local",
) -> OverSeeds:
    """Simulate under the experiment's seed and the ``num_seeds`` - 1 seeds after it.

    ``learn``: trains each seed's virtual trainers, from its own initial parameters and data. The other
    arguments are those of ``sim.many.pool.run_all``.

    Raises ``ConfigError`` for fewer than two seeds, or more than ``MOST_SEEDS``.
    """
    check_number(num_seeds)
    seeds = tuple(range(experiment.run.seed, experiment.run.seed + num_seeds))
    own = {seed: experiment.replace(run=dataclasses.replace(experiment.run, seed=seed)) for seed in seeds}
    jobs = [Job(label=f"seed {seed}", experiment=one) for seed, one in own.items()]
    with started(on):
        found = summaries(trained(jobs, learn, on), engine=engine, processes=processes, progress=progress, on=on)
    return OverSeeds(experiment=experiment, seeds=seeds, summaries=tuple(found))
