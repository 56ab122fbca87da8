"""Budget: how long legs are, what they may take together, and the settings that say so."""

import math

from fleetbench.experiment import Experiment
from fleetbench.plan.combination import OUTSIDE, Combination
from fleetbench.plan.servers.rules import rules_of
from tuner.to_target import FEWEST_SEEDS

DEFAULT = "default"
"""Name of the arm that others are compared with."""
SECONDS_PER_HOUR = 3600.0
_AMPLE = 1.5
"""Times what is expected, as a budget that is proposed."""


class BudgetSpent(Exception):  # noqa: N818  # an end of measuring, not an error of anybody
    """The next leg would exceed the budget of the real runs."""


def largest_geo_k(experiment: Experiment) -> int:
    """Of GeoSGD, with parameter servers: of those of ``tune.local_steps`` and the experiment's own, which Fleet may choose; 1 of none."""
    cluster, optimizer = experiment.cluster, experiment.workload.optimizer
    own = rules_of(experiment.strategy, cluster.trainers, cluster.servers, optimizer=optimizer, simulated=True).k_steps
    return max(1, own, *(experiment.tune.local_steps if optimizer == "sgd" else ()))


def leg_steps_of(experiment: Experiment) -> int:
    """``tune.leg_steps``, or as many as hold a round of every K that is searched: a step is priced in whole rounds."""
    own, tune = Combination.of(experiment.strategy), experiment.tune
    if experiment.strategy.mode == "ps":
        return max(tune.leg_steps, min(OUTSIDE + largest_geo_k(experiment), experiment.workload.steps))
    longest = max(tune.local_steps, default=1) if experiment.workload.target_loss is not None else 1
    if experiment.run.launcher == "command" and tune.diloco and longest > 1:  # a script's outer optimizer has twice the largest
        longest *= 2
    return max(tune.leg_steps, OUTSIDE + max(own.steps_per_round, own.steps_per_update * longest))


def budget_of(experiment: Experiment) -> tuple[float, str]:
    """Seconds that all trainers together may take in real runs, and the setting that says so; infinite where none does."""
    tune, trainers = experiment.tune, experiment.cluster.trainers
    limits = [(math.inf, "")]
    if tune.budget_gpu_hours is not None:
        limits.append((tune.budget_gpu_hours * SECONDS_PER_HOUR, f"tune.budget_gpu_hours = {tune.budget_gpu_hours:g}"))
    if tune.budget_minutes is not None:
        limits.append((tune.budget_minutes * 60 * trainers, f"tune.budget_minutes = {tune.budget_minutes:g}"))
    return min(limits)


def budget_for(experiment: Experiment, held_s: float) -> str | None:
    """The setting of a budget with ample room for so many seconds of all trainers together; none where there is no budget."""
    _, setting = budget_of(experiment)
    if "minutes" in setting:
        return f"tune.budget_minutes = {_AMPLE * held_s / experiment.cluster.trainers / 60:.2g}"
    return f"tune.budget_gpu_hours = {_AMPLE * held_s / SECONDS_PER_HOUR:.2g}" if setting else None


def seeds_of(experiment: Experiment) -> range:
    """Of the runs to the target of each way of training, at most, the experiment's own first; a declared loss has no seed."""
    number = 1 if experiment.run.device == "emulated" else experiment.tune.target_seeds or FEWEST_SEEDS
    return range(experiment.run.seed, experiment.run.seed + number)
