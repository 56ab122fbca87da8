"""Limits: how large a simulated run may be. A larger one is refused before memory or time is spent on it.

Each limit is some ten minutes or some gigabytes, on the machine of ``reports/simulator_speed``.
"""

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.stragglers import Episode, Trace

MOST_TRAINERS = 200_000
MOST_SERVERS = 10_000
MOST_STEPS = 5_000_000
"""Warm-up included. Arrays of ranks keep half a kilobyte of each."""
MOST_RANK_STEPS = 10_000_000_000
"""Steps of ranks by arrays."""
MOST_REMEMBERED = 100_000_000
"""Steps of ranks that are held at once: in a table, or as delays of which each follows from those before it."""
MOST_EVENTS = 10_000_000
"""Steps of ranks, and their operations, on SimPy's clock: 40 to 100 microseconds each."""
MOST_LAYERS = 20_000
MOST_BATCHES = 1_000_000
"""Batches that a trainer's loaders are ahead."""


def refuse_large(experiment: Experiment) -> None:
    """Raise ``ConfigError`` for an experiment that no engine simulates."""
    workload, cluster = experiment.workload, experiment.cluster
    steps = workload.steps + experiment.run.warmup_steps
    at_most(steps, MOST_STEPS, "steps", "workload.steps", "a few hundred steps tell what a step takes")
    at_most(cluster.trainers, MOST_TRAINERS, "trainers", "cluster.nodes", "fewer nodes, or trainers of each")
    at_most(cluster.servers, MOST_SERVERS, "servers", "cluster.servers", "fewer servers")
    at_most(cluster.trainers * steps, MOST_RANK_STEPS, "steps of ranks", "workload.steps", "fewer steps or trainers")
    if any(isinstance(straggler, Episode | Trace) for straggler in cluster.stragglers):
        hint = "fewer steps or trainers: episodes and traces are drawn from the first step on"
        at_most(cluster.trainers * steps, MOST_REMEMBERED, "delays at once", "cluster.stragglers", hint)
    num_layers = sum(spec.repeat for spec in workload.layers)
    at_most(num_layers, MOST_LAYERS, "layers", "workload.layers", "merge layers into larger ones")
    if workload.host is not None:
        batches = workload.host.loaders * workload.host.prefetch
        at_most(batches, MOST_BATCHES, "batches ahead", "workload.host.loaders", "fewer loaders, or batches ahead of each")


def at_most(number: int, most: int, what: str, where: str, hint: str) -> None:
    """Raise ``ConfigError`` for more than so many."""
    if number > most:
        raise ConfigError(f"makes more {what} than are simulated: {most:,} at most", where, f"{number:,} {what}", hint)
