"""Setting: what a plan depends on besides strategy and gradients, from an experiment."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Setting
from fleetbench.plan.layers import LayerTable
from fleetbench.plan.queues import queue_depth
from fleetbench.profile import Profile, all_reduce_cost, communication_of, links_for
from fleetbench.stragglers import LARGEST, ONE, Integers
from sim.links import Links

NUM_STATE_SLOTS = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2}
"""Tensors that an optimizer keeps for each parameter."""


def setting_of(experiment: Experiment, table: LayerTable, profile: Profile | None = None) -> Setting:
    """The setting of an experiment's plan.

    Raises ``ConfigError`` for a link that trainers use and nobody knows.
    """
    cluster = experiment.cluster
    nbytes = sum(gradient.nbytes for gradient in table.by_readiness() if not gradient.sparse)
    return Setting(
        trainers=cluster.trainers,
        trainers_per_node=cluster.trainers_per_node,
        queue_depth=queue_depth(experiment.run.backend),
        cost=all_reduce_cost(experiment, nbytes, profile),
        num_state_slots=NUM_STATE_SLOTS[experiment.workload.optimizer],
        buffers_nbytes=table.buffers_nbytes,
    )


def links_of(experiment: Experiment, profile: Profile | None = None) -> Links:
    """The links that are declared or measured. Raises ``ConfigError`` for one that is used and neither."""
    cluster = experiment.cluster
    intra, inter = links_for(experiment, profile)
    measured = communication_of(experiment, profile)
    return Links(
        trainers_per_node=cluster.trainers_per_node,
        intra=intra,
        inter=inter,
        nics_per_node=cluster.nics_per_node,
        nodes=cluster.nodes,
        racks=cluster.racks,
        intra_of={node: own.intra for own in cluster.node_overrides if own.intra is not None for node in own.nodes},
        inter_of={node: own.inter for own in cluster.node_overrides if own.inter is not None for node in own.nodes},
        measured=None if measured is None else measured.link,
        in_flight=() if measured is None else measured.in_flight,
        measured_name="inter" if measured is not None and measured.between == "nodes" else "intra",
        collective=cluster.collective,
        points=() if measured is None else measured.points,
        measured_trainers=0 if measured is None else measured.trainers,
    )


def slowed(delays: Integers, cluster: Cluster) -> Integers:
    """X of every rank and step, shape ``(trainers, steps)`` in units of 2^-24, where nodes are slow or fast by themselves.

    A node's ``slowdown`` s makes 1 + X of it s (1 + X), rounded. Raises ``ConfigError`` above a million.
    """
    factors = np.array([cluster.slowdown(node) for node in range(cluster.nodes)])
    if (factors == 1.0).all():
        return delays
    return times(delays, np.repeat(factors, cluster.trainers_per_node)[:, None])


def times(delays: Integers, factors: npt.NDArray[np.float64]) -> Integers:
    """X where 1 + X is so many times as much. Raises ``ConfigError`` above a million."""
    product = (delays + ONE) * factors
    if product.max(initial=0.0) > LARGEST * ONE:
        what = "makes a step take more than a million times its own compute"
        value = f"{product.max() / ONE:.3g} times"
        raise ConfigError(what, "cluster.node_overrides", value, "slowdown and stragglers multiply: lower the slowdown")
    return np.rint(product).astype(np.int64) - ONE
