"""Pairs: fresh legs of two strategies in alternating order, which alone speak in a verdict."""

from __future__ import annotations

from collections.abc import Callable

from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from tuner.legs import Legs
from tuner.recommendation import Pair
from tuner.statistics import Speedup, paired_speedup

DEFAULT = "default"


def measured_step_s(result: RunResult) -> float:
    """Seconds of a step of a leg, from its first start to its last end."""
    return result.summary.wall_s / result.summary.steps


def measure_pairs(
    experiment: Experiment, legs: Legs, finalist: str, strategy: DistributedStrategy, on_pair: Callable[[Pair], None]
) -> None:
    """Run ``tune.pairs`` pairs of the experiment's own strategy and ``strategy``: A B, B A, A B, ....

    ``on_pair`` is told every pair as it is complete. Raises what the legs raise.
    """
    arms = [(DEFAULT, experiment.strategy), (finalist, strategy)]
    for number in range(experiment.tune.pairs):
        default_first = number % 2 == 0
        ordered = arms if default_first else arms[::-1]
        legs.together((arm for _, arm in ordered), steps=experiment.tune.leg_steps)
        step_s = {name: measured_step_s(legs.run(name, arm, steps=experiment.tune.leg_steps)) for name, arm in ordered}
        on_pair(Pair(default_s=step_s[DEFAULT], finalist_s=step_s[finalist], default_first=default_first))


def remeasure(experiment: Experiment, strategy: DistributedStrategy) -> tuple[Speedup, tuple[Pair, ...]]:
    """Measure a recommendation again in a launch of its own; ``workload.profile`` must be filled in.

    Nothing is stored. Raises what a session raises.
    """
    from real.processes.folders import temporary_folder
    from real.session import Session

    profile = None if experiment.workload.profile is None else Profile.load(experiment.workload.profile)
    pairs: list[Pair] = []
    with temporary_folder() as folder, Session(experiment, profile) as session:
        measure_pairs(experiment, Legs(experiment=experiment, runner=session, folder=folder, step_s=0.0), "again", strategy, pairs.append)
    return paired_speedup([pair.default_s for pair in pairs], [pair.finalist_s for pair in pairs]), tuple(pairs)
