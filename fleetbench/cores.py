"""Cores: compute time on a node with fewer cores than its trainers have threads.

A profile's layer times include the sharing of cores on its own machine. They are used unchanged for a node
with at least as many cores per trainer. On a node with fewer, a trainer of t threads has c =
``cores_per_node`` / ``trainers_per_node`` cores and computes as the profile's trainers with c threads did.
Between measured thread counts, times are interpolated linearly on two logarithmic axes. Below the fewest
measured cores, threads take turns: half the cores, twice the time.
"""

import dataclasses
import math

import numpy as np

from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable, scaled, times
from fleetbench.profile import Profile, profile_of
from fleetbench.workload import LAYERS


def shares_cores(experiment: Experiment) -> bool:
    """Whether ``cores_per_node`` affects compute times: for measured layers on CPUs, outside of the testbed."""
    run = experiment.run
    return run.device == "cpu" and run.launcher != "testbed" and experiment.workload.model != LAYERS


def on_cores(experiment: Experiment, table: LayerTable) -> LayerTable:
    """Return the layer table with compute times for the experiment's number of cores."""
    if not shares_cores(experiment):
        return table
    profile = profile_of(experiment)
    factor = 1.0 if profile is None else slowdown(experiment, profile)
    return table if factor == 1.0 else stretched(table, factor)


def slowdown(experiment: Experiment, profile: Profile) -> float:
    """Return the factor by which compute takes longer than in ``profile``; at least 1."""
    cluster, threads = experiment.cluster, experiment.strategy.thread_num
    trainers = max(cluster.trainers_by_node)
    most = math.inf if profile.cores is None else profile.cores / trainers
    had = min(float(threads), most)
    share = cluster.cores_per_node / trainers
    if share >= had:
        return 1.0
    cluster.require_even("trainers have too few cores, and nodes with different numbers of trainers cannot be simulated then")
    measured = {float(line.thread_num): float(line.compute) for line in profile.threads if line.thread_num <= most}
    if had not in measured:
        return had / share
    return max(1.0, _took(measured, share) / measured[had])


def _took(measured: dict[float, float], cores: float) -> float:
    """Return the compute time with ``cores`` cores, fewer than the most in ``measured`` (times by threads)."""
    counts = sorted(measured)
    if cores < counts[0]:
        return measured[counts[0]] * counts[0] / cores
    return math.exp(np.interp(math.log(cores), np.log(counts), np.log([measured[count] for count in counts])))


def stretched(table: LayerTable, factor: float) -> LayerTable:
    """Return the table with forward, backward and update ``factor`` times as long."""
    return dataclasses.replace(scaled(table, factor, factor), update=times(table.update, factor))
