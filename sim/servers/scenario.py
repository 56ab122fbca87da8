"""Scenario: the job that an experiment describes, or the refusal of what is not simulated yet."""

from __future__ import annotations

import dataclasses

from fleetbench.cluster import Link
from fleetbench.cores import on_cores
from fleetbench.declared import LOSSES, refuse_undeclared
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.servers.rules import rules_of
from fleetbench.profile import Profile, communication_of, table_for
from fleetbench.stragglers import draws
from fleetbench.support import RUN, WORKLOAD, refuse_unexecuted
from sim.servers.costs import Costs, costs_of
from sim.servers.job import Job
from sim.servers.traffic import Traffic, traffic_of
from sim.servers.wires import Hosts

WHO = "the simulator of parameter servers"
CLUSTER = frozenset(
    f"cluster.{name}"
    for name in ("nodes", "trainers_per_node", "servers", "server_placement", "intra", "inter", "cores_per_node", "stragglers")
)


def job_of(experiment: Experiment, profile: Profile | None = None, *, costs: Costs | None = None, traffic: Traffic | None = None) -> Job:
    """Resolve an experiment with ``mode = "ps"``.

    ``costs`` and ``traffic`` are the layer table's, where nobody has measured better ones. Raises
    ``ConfigError`` for a field that is not simulated, or a missing profile or link.
    """
    for part, executed in (("workload", WORKLOAD | LOSSES), ("cluster", CLUSTER), ("run", RUN)):
        refuse_unexecuted(getattr(experiment, part), part, executed, WHO)
    refuse_undeclared(experiment, experiment.strategy, WHO)
    measured = table_for(experiment, profile)
    table = on_cores(experiment, measured, profile)
    gradients = table.by_readiness()
    cluster, run = experiment.cluster, experiment.run
    rules = rules_of(
        experiment.strategy,
        cluster.trainers,
        cluster.servers,
        optimizer=experiment.workload.optimizer,
        parameter_bytes=sum(gradient.nbytes for gradient in gradients),
        has_dense=any(not gradient.sparse for gradient in gradients),
    )
    traffic = traffic or traffic_of(gradients, cluster.servers)
    steps = range(1 - run.warmup_steps, experiment.workload.steps + 1)
    delays = draws(cluster.stragglers, run.seed, cluster.trainers, cluster.trainers_per_node, steps.start, len(steps))
    return Job(
        rules=rules,
        table=table,
        traffic=traffic,
        costs=costs or dataclasses.replace(costs_of(measured, traffic.push(1) * cluster.servers), update_ns=table.update),
        hosts=hosts_of(experiment, profile),
        steps=steps,
        draws=tuple(map(tuple, delays.tolist())),
        fetch_every=experiment.strategy.fetch_every_n_steps,
    )


def hosts_of(experiment: Experiment, profile: Profile | None = None) -> Hosts:
    """Nodes are hosts; servers have hosts of their own behind them, or share the nodes. Raises ``ConfigError`` without a link."""
    cluster = experiment.cluster
    measured = communication_of(experiment, profile)
    link = cluster.inter or (measured.link if measured is not None and measured.between == "nodes" else None)
    own = cluster.server_placement == "own"
    if link is None:
        if own or cluster.nodes > 1:
            hint = 'add inter = { bandwidth = "25 Gbit/s", latency = "20 us" }'
            raise ConfigError("trainers reach servers over this link, and it is neither declared nor measured", "cluster.inter", hint=hint)
        link = Link(bandwidth=1)  # type: ignore[arg-type]  # nothing crosses it: all are on one host
    return Hosts(
        trainers=tuple(rank // cluster.trainers_per_node for rank in range(cluster.trainers)),
        servers=tuple((cluster.nodes if own else 0) + server for server in range(cluster.servers)),
        link=link,
    )
