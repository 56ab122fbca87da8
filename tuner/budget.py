"""Budget: the length of legs, the time that they may take together, and the settings that limit it."""

import dataclasses
import math

from fleetbench.experiment import Experiment
from fleetbench.plan.combination import OUTSIDE, Combination
from fleetbench.plan.servers.rules import rules_of
from fleetbench.profile import table_for
from tuner.to_target import FEWEST_SEEDS

DEFAULT = "default"
"""Name of the arm that others are compared with."""
SECONDS_PER_HOUR = 3600.0
_LEAST_STEPS = 15
"""Least number of steps to which ``tune.leg_seconds`` shortens a leg."""
_AMPLE = 1.5
"""Factor by which a proposed budget exceeds the expected time."""


class BudgetSpent(Exception):  # noqa: N818  # it ends the measurements and is not an error
    """Raised if the next leg would exceed the budget of the real runs."""


def largest_geo_k(experiment: Experiment) -> int:
    """Return the largest K of GeoSGD: from ``tune.local_steps`` or the experiment's own K, or 1 without GeoSGD."""
    cluster, optimizer = experiment.cluster, experiment.workload.optimizer
    own = rules_of(experiment.strategy, cluster.trainers, cluster.servers, optimizer=optimizer).k_steps
    return max(1, own, *(experiment.tune.local_steps if optimizer == "sgd" else ()))


def leg_steps_of(experiment: Experiment) -> int:
    """Return the number of counted steps in a leg: ``tune.leg_steps``, but at least a round of every searched K."""
    own, tune = Combination.of(experiment.strategy), experiment.tune
    if experiment.strategy.mode == "ps":
        return max(tune.leg_steps, min(OUTSIDE + largest_geo_k(experiment), experiment.workload.steps))
    longest = max(tune.local_steps, default=1) if experiment.workload.target_loss is not None else 1
    if experiment.run.launcher == "command" and tune.diloco and longest > 1:  # a script's outer optimizer has twice the largest
        longest *= 2
    return max(tune.leg_steps, OUTSIDE + max(own.steps_per_round, own.steps_per_update * longest))


def with_leg_steps(experiment: Experiment) -> Experiment:
    """Return the experiment with ``tune.leg_seconds`` resolved: it shortens ``tune.leg_steps``, and is then None.

    The steps are halved while they compute for longer, so that another profile rarely changes their number.
    """
    tune, steps = experiment.tune, experiment.tune.leg_steps
    if tune.leg_seconds is None:
        return experiment
    table = table_for(experiment)
    while steps >= 2 * _LEAST_STEPS and steps * (table.forward_ns + table.backward_ns) * 1e-9 > tune.leg_seconds:
        steps //= 2
    return experiment.replace(tune=dataclasses.replace(tune, leg_steps=steps, leg_seconds=None))


def budget_of(experiment: Experiment) -> tuple[float, str]:
    """Return the limit on the trainer seconds of real runs, and the setting that defines it, as text.

    Without such a setting the limit is infinite and the text empty.
    """
    tune, trainers = experiment.tune, experiment.cluster.trainers
    limits = [(math.inf, "")]
    if tune.budget_gpu_hours is not None:
        limits.append((tune.budget_gpu_hours * SECONDS_PER_HOUR, f"tune.budget_gpu_hours = {tune.budget_gpu_hours:g}"))
    if tune.budget_minutes is not None:
        limits.append((tune.budget_minutes * 60 * trainers, f"tune.budget_minutes = {tune.budget_minutes:g}"))
    return min(limits)


def budget_for(experiment: Experiment, held_s: float) -> str | None:
    """Return a budget setting with ample room for ``held_s`` trainer seconds, or None if no budget is set."""
    _, setting = budget_of(experiment)
    if "minutes" in setting:
        return f"tune.budget_minutes = {_AMPLE * held_s / experiment.cluster.trainers / 60:.2g}"
    return f"tune.budget_gpu_hours = {_AMPLE * held_s / SECONDS_PER_HOUR:.2g}" if setting else None


def seeds_of(experiment: Experiment) -> range:
    """Return the seeds with which each way of training runs to the target, the experiment's own seed first.

    There is only one with emulated compute, whose loss is declared.
    """
    number = 1 if experiment.run.device == "emulated" else experiment.tune.target_seeds or FEWEST_SEEDS
    return range(experiment.run.seed, experiment.run.seed + number)
