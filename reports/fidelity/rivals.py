"""Rivals: what formulas say, given the same latency and bandwidth, the same layer times and the same plan.

- ``draws``: the recursion of bucketed overlap, with every step's X of every rank, as the simulator has them. Bucket b starts
  at max(max over ranks of its readiness, end of the bucket before it on its communicator) and takes alpha + S beta;
  communicators share the bandwidth, each having its part of it all the time. Trainers that update alone meet when the
  last of them has done its steps, and then all buckets follow each other.
- ``means``: the same with E[X] for X, as on paper.
- ``naive``: compute of the slowest rank by E[X], plus the bytes on the wire by the bandwidth; no latency, no overlap.

Hierarchical, g in a group, N groups (inner link i, outer link o):
``2 (g - 1) a_i + 2 ((g - 1) / g) S / B_i + 2 (N - 1) a_o + 2 ((N - 1) / N) S / B_o``.
When trainers meet, adaptive steps included, is read off the plan for all three: that is no matter of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable
from fleetbench.result import RunResult
from fleetbench.stragglers import ONE, Jitter, SlowNode, SlowRank, draws

Floats = npt.NDArray[np.float64]
RIVALS = ("draws", "means", "naive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """``alpha + S beta``, in seconds and bytes."""

    alpha_s: float
    beta_s: float


@dataclass(frozen=True, slots=True)
class Said:
    """What a rival says of a run."""

    wall_s: float
    not_compute_s: float
    """Of a step, the mean over ranks of what is not compute."""


def rivals(run: RunResult, table: LayerTable, inside: Link | None, between: Link) -> dict[str, Said]:
    """What they say of the run that ``run`` simulates."""
    experiment = run.experiment
    cluster, steps = experiment.cluster, experiment.workload.steps
    drawn = draws(cluster.stragglers, experiment.run.seed, cluster.trainers, cluster.trainers_per_node, 1, steps) / ONE
    mean = np.repeat(_means(cluster)[:, None], steps, axis=1)
    first = run.steps[(run.steps["rank"] == 0) & (run.steps["step"] >= 1)].sort_values("step")
    meets = [bool(sent) for sent in first["bytes_sent"] > 0]
    cost = _cost(experiment, inside, between)
    compute_s = (table.forward_ns + table.backward_ns) * 1e-9
    nbytes = [bucket.nbytes for bucket in run.plan.buckets]
    course = _Course(experiment, table, run, cost, meets)
    walls = {"draws": course.wall_s(drawn), "means": course.wall_s(mean)}
    trainers = cluster.trainers
    on_wire_s = 2 * (trainers - 1) / trainers * sum(nbytes) * 8 / between.bandwidth
    walls["naive"] = steps * compute_s * (1.0 + float(mean.max())) + sum(meets) * on_wire_s
    shares = {"draws": drawn, "means": mean, "naive": mean}
    return {name: Said(wall_s, wall_s / steps - compute_s * (1.0 + float(shares[name].mean()))) for name, wall_s in walls.items()}


class _Course:
    """The recursion over a run's steps."""

    def __init__(self, experiment: Experiment, table: LayerTable, run: RunResult, cost: Cost, meets: Sequence[bool]) -> None:
        strategy = experiment.strategy
        ready_s = {gradient.name: gradient.ready * 1e-9 for gradient in table.by_readiness()}
        own = [max(ready_s[name] for name in bucket.gradients) for bucket in run.plan.buckets]
        self._ready_s = [table.forward_ns * 1e-9 + latest for latest in accumulate(own, max)]
        self._compute_s = (table.forward_ns + table.backward_ns) * 1e-9
        self._nbytes = [bucket.nbytes for bucket in run.plan.buckets]
        depth = 1 if strategy.use_hierarchical_allreduce else run.plan.queue_depth
        self._lanes = 1 if strategy.sync_nccl_allreduce else min(depth * strategy.nccl_comm_num, len(self._nbytes))
        self._is_local = strategy.is_local
        self._cost = cost
        self._meets = meets

    def wall_s(self, x: Floats) -> float:
        """The run time, with X by rank and step."""
        clock = np.zeros(x.shape[0])
        for step, meets in enumerate(self._meets):
            stretch = 1.0 + x[:, step]
            ends = clock + stretch * self._compute_s
            if not meets:
                clock = ends
            elif self._is_local:
                clock = np.full_like(clock, ends.max() + sum(self._takes_s(nbytes, 1) for nbytes in self._nbytes))
            else:
                clock = np.full_like(clock, max(self._exchange(clock, stretch), ends.max()))
        return float(clock.max())

    def _exchange(self, clock: Floats, stretch: Floats) -> float:
        """When the last bucket has arrived."""
        free = [0.0] * self._lanes
        for index, (ready_s, nbytes) in enumerate(zip(self._ready_s, self._nbytes, strict=True)):
            lane = index % self._lanes
            start = max(float((clock + stretch * ready_s).max()), free[lane])
            free[lane] = start + self._takes_s(nbytes, self._lanes)
        return max(free)

    def _takes_s(self, nbytes: int, sharing: int) -> float:
        return self._cost.alpha_s + nbytes * self._cost.beta_s * sharing


def _cost(experiment: Experiment, inside: Link | None, between: Link) -> Cost:
    cluster, strategy = experiment.cluster, experiment.strategy
    if not strategy.use_hierarchical_allreduce:
        return _ring(cluster.trainers, between)
    inner = strategy.hierarchical_inner_ranks or cluster.trainers_per_node
    link = inside if inner <= cluster.trainers_per_node and inside is not None else between
    parts = (_ring(inner, link), _ring(cluster.trainers // inner, between))
    return Cost(alpha_s=sum(part.alpha_s for part in parts), beta_s=sum(part.beta_s for part in parts))


def _ring(ranks: int, link: Link) -> Cost:
    steps = 2 * (ranks - 1)
    return Cost(alpha_s=steps * link.latency * 1e-9, beta_s=steps / ranks * 8 / link.bandwidth)


def _means(cluster: Cluster) -> Floats:
    """E[X] of every rank."""
    ranks = np.arange(cluster.trainers)
    product = np.ones(cluster.trainers)
    for entry in cluster.stragglers:
        if isinstance(entry, Jitter):
            product *= 1.0 + entry.mean
        elif isinstance(entry, SlowRank):
            product[np.isin(ranks, entry.ranks)] *= entry.factor
        else:
            assert isinstance(entry, SlowNode), f"no mean of {entry}"
            product[np.isin(ranks // cluster.trainers_per_node, entry.nodes)] *= entry.factor
    return product - 1.0
