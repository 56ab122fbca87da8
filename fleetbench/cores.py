"""Cores: what compute takes where a node has fewer cores than its trainers have threads.

A profile's layer times hold what its own machine's trainers shared, and no more is known of a node with
as many cores a trainer or more. On one with fewer, a trainer of t threads has c = ``cores_per_node`` /
``trainers_per_node`` cores, and computes as the profile's trainers with c threads did: its lines of other
thread counts, with straight lines between them on two logarithmic axes. Below the fewest cores that were
measured, threads take turns: half the cores, twice the time.
"""

import dataclasses
import math

import numpy as np

from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable, scaled, times
from fleetbench.profile import Profile, profile_of
from fleetbench.workload import LAYERS


def shares_cores(experiment: Experiment) -> bool:
    """Whether ``cores_per_node`` matters: where a processor computes what a profile measured, and nodes are machines."""
    run = experiment.run
    return run.device == "cpu" and run.launcher != "testbed" and experiment.workload.model != LAYERS


def on_cores(experiment: Experiment, table: LayerTable) -> LayerTable:
    """The layer table on the experiment's cores, of which its profile knows how many there were."""
    if not shares_cores(experiment):
        return table
    profile = profile_of(experiment)
    factor = 1.0 if profile is None else slowdown(experiment, profile)
    return table if factor == 1.0 else stretched(table, factor)


def slowdown(experiment: Experiment, profile: Profile) -> float:
    """By which factor compute takes longer than in ``profile``; at least 1."""
    cluster, threads = experiment.cluster, experiment.strategy.thread_num
    trainers = max(cluster.trainers_by_node)
    most = math.inf if profile.cores is None else profile.cores / trainers
    had = min(float(threads), most)
    share = cluster.cores_per_node / trainers
    if share >= had:
        return 1.0
    cluster.require_even("trainers have too few cores, and compute that differs by a node's number of trainers is not simulated")
    measured = {float(line.thread_num): float(line.compute) for line in profile.threads if line.thread_num <= most}
    if had not in measured:
        return had / share
    return max(1.0, _took(measured, share) / measured[had])


def _took(measured: dict[float, float], cores: float) -> float:
    """Compute with so many cores, fewer than the most that were measured."""
    counts = sorted(measured)
    if cores < counts[0]:
        return measured[counts[0]] * counts[0] / cores
    return math.exp(np.interp(math.log(cores), np.log(counts), np.log([measured[count] for count in counts])))


def stretched(table: LayerTable, factor: float) -> LayerTable:
    """Forward, backward and update ``factor`` times as long."""
    return dataclasses.replace(scaled(table, factor, factor), update=times(table.update, factor))
