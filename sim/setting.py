"""Setting: what a plan depends on besides strategy and gradients, from an experiment."""

from __future__ import annotations

from fleetbench.experiment import Experiment
from fleetbench.plan.build import Setting
from fleetbench.plan.groups import queue_depth
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, all_reduce_cost, communication_of, links_for
from fleetbench.workload import OPTIMIZER_STATE
from sim.network.links import Links


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
        num_state_slots=len(OPTIMIZER_STATE[experiment.workload.optimizer]),
        buffers_nbytes=table.buffers_nbytes,
    )


def links_of(experiment: Experiment, profile: Profile | None = None) -> Links:
    """The links that are declared or measured. Raises ``ConfigError`` for one that is used and neither."""
    cluster = experiment.cluster
    intra, inter = links_for(experiment, profile)
    return Links(
        trainers_per_node=cluster.trainers_per_node,
        intra=intra,
        inter=inter,
        nics_per_node=cluster.nics_per_node,
        nodes=cluster.nodes,
        racks=cluster.racks,
        intra_of={node: own.intra for own in cluster.node_overrides if own.intra is not None for node in own.nodes},
        inter_of={node: own.inter for own in cluster.node_overrides if own.inter is not None for node in own.nodes},
        measured=communication_of(experiment, profile),
        collective=cluster.collective,
    )
