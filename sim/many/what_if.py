"""what_if: how much faster the same run would be without what makes it slow.

The same experiment is simulated again with one thing changed, under the same draws of all that stays:

- ``without stragglers``: X = 0 on every rank;
- ``without rank R``: X = 0 on that rank, so that no rank waits for it longer than for the fastest. The
  rank stays: the world, its traffic and everybody's share of the data are those of the run. It is the
  question that Lin et al. 2025 ask of production jobs ("Understanding Stragglers in Large Model Training
  Using What-if Analysis", OSDI, section 3: all other operations as they were, the worker's as they should be);
- ``without node N``: X = 0 on all its ranks;
- ``with infinite bandwidth``: every link carries any number of bytes in its latency (a fusion that plans
  by what links cost plans again);
- ``with neither``: no stragglers and infinite bandwidth, which is what compute and latency alone take.

What makes a node slow by itself (``node_overrides``) stays in all cases: the file without an entry is what answers that.
A gain is the run's time over the time without: 1.25 means that the run would be 1.25 times as fast.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetbench.cluster import Link
from fleetbench.experiment import Experiment
from fleetbench.profile import links_for
from fleetbench.quantities import BitsPerSecond
from fleetbench.result import Summary
from sim.run import Engine, simulate
from sim.scenario import Draws

INFINITE = BitsPerSecond(10**18)
"""Bits per second that stand for infinitely many: a gigabyte takes 8 ns."""
AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of the runs, and what it gains over the run as it is."""

    name: str
    summary: Summary
    gain: float
    """Time of the run as it is over this one's; 1 for itself."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        own = self.summary
        return {"name": self.name, "gain": self.gain, "wall_s": own.wall_s, "step_s": own.step_s["mean"], "per_trainer": own.per_trainer}


def what_if(
    experiment: Experiment,
    *,
    engine: Engine = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Case, ...]:
    """Simulate ``experiment`` as it is, and without each thing that slows it; the run as it is comes first.

    ``progress`` is told how many of the runs are done. ``engine`` and errors are those of ``simulate``.
    """
    slowest = slowest_rank_and_node(experiment)
    quick = with_infinite_bandwidth(experiment)
    cases: list[tuple[str, Experiment, tuple[int, ...]]] = [(AS_IT_IS, experiment, ())]
    if experiment.cluster.stragglers:
        cases.append(("without stragglers", without_stragglers(experiment), ()))
        if slowest is not None and experiment.strategy.mode != "ps":  # the simulation of servers cannot take a rank's delays away
            rank, node = slowest
            cases.append((f"without rank {rank}", experiment, (rank,)))
            spared = tuple(other for other, place in enumerate(experiment.cluster.node_by_rank) if place == node)
            if 1 < len(spared) < experiment.cluster.trainers:
                cases.append((f"without node {node}", experiment, spared))
    if quick != experiment:
        cases.append(("with infinite bandwidth", quick, ()))
        if experiment.cluster.stragglers:
            cases.append(("with neither", without_stragglers(quick), ()))
    found: list[Case] = []
    for number, (name, changed, without) in enumerate(cases, start=1):
        summary = simulate(changed, timeline=False, table=False, spared=without, engine=engine).summary
        gain = found[0].summary.wall_s / summary.wall_s if found else 1.0
        found.append(Case(name=name, summary=summary, gain=gain))
        if progress is not None:
            progress(number, len(cases))
    return tuple(found)


def slowest_rank_and_node(experiment: Experiment) -> tuple[int, int] | None:
    """The rank and the node with the largest mean X over the counted steps, nodes' own slowness included, the lowest of equals.

    None where no rank is ever late.
    """
    steps = range(1, experiment.workload.steps + 1)
    late = Draws(cluster=experiment.cluster, seed=experiment.run.seed, steps=steps).of_ranks().sum(axis=1)
    if late.max() <= 0:
        return None
    return int(late.argmax()), int(np.bincount(experiment.cluster.node_by_rank, late).argmax())


def without_stragglers(experiment: Experiment) -> Experiment:
    """The experiment with X = 0 everywhere."""
    return experiment.replace(cluster=dataclasses.replace(experiment.cluster, stragglers=()))


def with_infinite_bandwidth(experiment: Experiment) -> Experiment:
    """The experiment whose links, declared or measured, take their latency and nothing more.

    Collectives that take what was measured become rings, whose latency is that of the measured link.
    """
    cluster = experiment.cluster
    intra, inter = links_for(experiment)
    overrides = tuple(
        dataclasses.replace(override, intra=_infinite(override.intra), inter=_infinite(override.inter))
        for override in cluster.node_overrides
    )
    carried = "ring" if cluster.collective == "measured" else cluster.collective
    quick = dataclasses.replace(
        cluster, collective=carried, measured=(), intra=_infinite(intra), inter=_infinite(inter), node_overrides=overrides, racks=None
    )
    if cluster.trainers == 1 and not cluster.servers:
        return experiment
    return experiment.replace(cluster=quick)


def _infinite(link: Link | None) -> Link | None:
    return None if link is None else dataclasses.replace(link, bandwidth=INFINITE, flow_limit=None)
