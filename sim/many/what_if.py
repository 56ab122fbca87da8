"""what_if: how much faster the same run would be without each thing that makes it slow.

The same experiment is simulated again with one thing changed and all other random draws kept:

- ``without stragglers``: X = 0 on every rank;
- ``without rank R``: X = 0 on that rank, so that no rank waits for it longer than for the fastest. The
  rank stays: the number of ranks, the traffic and every rank's share of the data are unchanged. Lin et al.
  2025 ask this of production jobs ("Understanding Stragglers in Large Model Training Using What-if
  Analysis", OSDI, section 3: all other operations as they were, the worker's as they should be);
- ``without node N``: X = 0 on all its ranks;
- ``with infinite bandwidth``: every link carries any number of bytes in its latency (a fusion that depends
  on the cost of links is planned again);
- ``with neither``: no stragglers and infinite bandwidth, which leaves only compute and latency.

A node's own slowness (``node_overrides``) stays in all cases: remove its entry to see its effect.
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
from sim.many.pool import Job, Where, summaries
from sim.run import Engine
from sim.scenario import Draws

INFINITE = BitsPerSecond(10**18)
"""Bits per second that stand for an infinite bandwidth: a gigabyte takes 8 ns."""
AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of the runs, and its gain over the run as it is."""

    name: str
    summary: Summary
    gain: float
    """Time of the run as it is, divided by this run's time; 1 for the run as it is."""

    def to_dict(self) -> dict[str, Any]:
        """Return the case as plain data."""
        own = self.summary
        return {"name": self.name, "gain": self.gain, "wall_s": own.wall_s, "step_s": own.step_s["mean"], "per_trainer": own.per_trainer}


def what_if(
    experiment: Experiment,
    *,
    engine: Engine = "auto",
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    on: Where = "local",
) -> tuple[Case, ...]:
    """Simulate ``experiment`` as it is, and without each cause of slowness; the run as it is comes first.

    ``engine`` and errors: as in ``simulate``. The other arguments are those of ``sim.many.pool.run_all``.
    """
    slowest = slowest_rank_and_node(experiment)
    quick = with_infinite_bandwidth(experiment)
    cases: list[tuple[str, Experiment, tuple[int, ...]]] = [(AS_IT_IS, experiment, ())]
    if experiment.cluster.stragglers:
        cases.append(("without stragglers", without_stragglers(experiment), ()))
        # the simulation of servers cannot take a rank's delays away
        if slowest is not None and experiment.strategy.mode != "ps":
            rank, node = slowest
            cases.append((f"without rank {rank}", experiment, (rank,)))
            spared = tuple(other for other, place in enumerate(experiment.cluster.node_by_rank) if place == node)
            if 1 < len(spared) < experiment.cluster.trainers:
                cases.append((f"without node {node}", experiment, spared))
    if quick != experiment:
        cases.append(("with infinite bandwidth", quick, ()))
        if experiment.cluster.stragglers:
            cases.append(("with neither", without_stragglers(quick), ()))
    jobs = [Job(label="", experiment=changed, spared=without) for _, changed, without in cases]
    found = summaries(jobs, engine=engine, processes=processes, progress=progress, on=on)
    gains = [1.0, *(found[0].wall_s / summary.wall_s for summary in found[1:])]
    return tuple(Case(name=name, summary=own, gain=gain) for (name, *_), own, gain in zip(cases, found, gains, strict=True))


def slowest_rank_and_node(experiment: Experiment) -> tuple[int, int] | None:
    """Return the rank with the largest mean X over the counted steps, and the node whose ranks have the largest mean.

    X includes nodes' own slowness. The lowest number wins a tie. Returns ``None`` if no rank is ever late.
    """
    steps = range(1, experiment.workload.steps + 1)
    late = Draws(cluster=experiment.cluster, seed=experiment.run.seed, steps=steps).of_ranks().sum(axis=1)
    if late.max() <= 0:
        return None
    nodes = experiment.cluster.node_by_rank
    return int(late.argmax()), int((np.bincount(nodes, late) / np.bincount(nodes)).argmax())


def without_stragglers(experiment: Experiment) -> Experiment:
    """Return the experiment with X = 0 everywhere."""
    return experiment.replace(cluster=dataclasses.replace(experiment.cluster, stragglers=()))


def with_infinite_bandwidth(experiment: Experiment) -> Experiment:
    """Return the experiment with links, declared or measured, that take only their latency.

    Collectives with measured times become rings with the measured link's latency.
    """
    cluster = experiment.cluster
    intra, inter = links_for(experiment)
    overrides = tuple(
        dataclasses.replace(override, intra=_infinite(override.intra), inter=_infinite(override.inter))
        for override in cluster.node_overrides
    )
    carried = "ring" if cluster.collective == "measured" else cluster.collective
    quick = dataclasses.replace(
        cluster,
        collective=carried,
        measured=(),
        intra=_infinite(intra),
        inter=_infinite(inter),
        node_overrides=overrides,
        racks=None,
        sites=tuple(dataclasses.replace(site, up=_unlimited(site.up), down=_infinite(site.down)) for site in cluster.sites),
    )
    if cluster.trainers == 1 and not cluster.servers:
        return experiment
    return experiment.replace(cluster=quick)


def _infinite(link: Link | None) -> Link | None:
    return None if link is None else _unlimited(link)


def _unlimited(link: Link) -> Link:
    return dataclasses.replace(link, bandwidth=INFINITE, flow_limit=None, loss=None)
