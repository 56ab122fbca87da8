"""Limits: how large a simulated run may be. A larger one is refused before it takes memory or time.

Each limit corresponds to about ten minutes or some gigabytes, on the machine of ``reports/simulator_speed``.
"""

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.stragglers import Episode, Trace

MOST_TRAINERS = 200_000
MOST_SERVERS = 10_000
MOST_STEPS = 5_000_000
"""Largest number of steps, warm-up included. Arrays of ranks keep half a kilobyte per step."""
MOST_RANK_STEPS = 10_000_000_000
"""Largest number of steps of all ranks together, for the engine of arrays."""
MOST_REMEMBERED = 100_000_000
"""Largest number of steps of all ranks that are in memory at once: in a table, or as delays that depend on
earlier delays."""
MOST_EVENTS = 10_000_000
"""Largest number of steps of all ranks, and their operations, on SimPy's clock. Each takes 40 to 100
microseconds."""
MOST_LAYERS = 20_000
MOST_BATCHES = 1_000_000
"""Largest number of batches that a trainer's loaders may prepare ahead."""


def refuse_large(experiment: Experiment) -> None:
    """Raise ``ConfigError`` for an experiment that is too large for every engine."""
    workload, cluster = experiment.workload, experiment.cluster
    steps = workload.steps + experiment.run.warmup_steps
    at_most(steps, MOST_STEPS, "steps", "workload.steps", "a few hundred steps show how long a step takes")
    at_most(cluster.trainers, MOST_TRAINERS, "trainers", "cluster.nodes", "fewer nodes, or trainers per node")
    at_most(cluster.servers, MOST_SERVERS, "servers", "cluster.servers", "fewer servers")
    at_most(cluster.trainers * steps, MOST_RANK_STEPS, "steps of ranks", "workload.steps", "fewer steps or trainers")
    if any(isinstance(straggler, Episode | Trace) for straggler in cluster.stragglers):
        hint = "fewer steps or trainers: episodes and traces are drawn from the first step on"
        at_most(cluster.trainers * steps, MOST_REMEMBERED, "delays at once", "cluster.stragglers", hint)
    num_layers = sum(spec.repeat for spec in workload.layers)
    at_most(num_layers, MOST_LAYERS, "layers", "workload.layers", "merge layers into larger ones")
    if workload.host is not None:
        batches = workload.host.loaders * workload.host.prefetch
        at_most(batches, MOST_BATCHES, "batches ahead", "workload.host.loaders", "fewer loaders, or a smaller prefetch")


def at_most(number: int, most: int, what: str, where: str, hint: str) -> None:
    """Raise ``ConfigError`` if ``number`` exceeds ``most``."""
    if number > most:
        raise ConfigError(f"makes more {what} than are simulated: {most:,} at most", where, f"{number:,} {what}", hint)
