"""Advice: what Fleet's documents would use here, as a strategy to measure beside the default.

The rules are the documents' own: buckets of a tenth of the gradients' bytes; on one node one
communicator and one thread, on several two communicators and a thread more than those; on several
nodes a hierarchy over the trainers of a node; Local SGD after the first decay of the learning
rate; op fusion; mixed precision.
"""

from __future__ import annotations

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, check_strategy
from fleetbench.plan.family import PLANNED
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, table_for
from fleetbench.quantities import MIB
from fleetbench.strategy import DistributedStrategy

LOCAL_STEPS = 2
"""The smaller of the two values of K that the documents report."""
FUSED_SHARE = 0.1
"""Of the gradients' bytes, in one bucket."""
NOT_EXECUTED = "not executed here yet"


def advice(experiment: Experiment, table: LayerTable, profile: Profile | None = None) -> tuple[DistributedStrategy, tuple[str, ...]]:
    """Fleet's advice on top of the experiment's strategy, and what was left out of it with the reason.

    ``table`` is the layer table of the experiment's own strategy; a profile that is not given is
    read from the file the workload names.
    """
    left_out: list[str] = []
    strategy = _threads(_communicators(_fusion(experiment.strategy, table), experiment), experiment, profile, left_out)
    strategy = _hierarchy(strategy, experiment, left_out)
    strategy = _local_sgd(strategy, experiment, left_out)
    left_out += [f"{what}: {NOT_EXECUTED}" for what, name in _SWITCHES if f"strategy.{name}" not in PLANNED]
    return strategy, tuple(left_out)


_SWITCHES = (("op fusion", "build_strategy.fuse_all_optimizer_ops"), ("mixed precision", "amp"))


def _fusion(strategy: DistributedStrategy, table: LayerTable) -> DistributedStrategy:
    size = sum(gradient.nbytes for gradient in table.by_readiness() if not gradient.sparse)
    if size == 0:
        return strategy
    plain = DistributedStrategy()
    return strategy.replace(
        fuse_all_reduce_ops=True,
        fusion="fleet",
        fuse_grad_size_in_num=plain.fuse_grad_size_in_num,
        last_comm_group_size_MB=plain.last_comm_group_size_MB,
        fuse_grad_size_in_MB=float(f"{FUSED_SHARE * size / MIB:.4g}"),
    )


def _communicators(strategy: DistributedStrategy, experiment: Experiment) -> DistributedStrategy:
    several = experiment.cluster.nodes > 1
    return strategy.replace(nccl_comm_num=2 if several else 1, sync_nccl_allreduce=not several)


def _threads(strategy: DistributedStrategy, experiment: Experiment, profile: Profile | None, left_out: list[str]) -> DistributedStrategy:
    threads = strategy.nccl_comm_num + 1 if experiment.cluster.nodes > 1 else 1
    advised = strategy.replace(thread_num=threads)
    try:
        table_for(experiment.replace(strategy=advised), profile)
    except ConfigError as error:
        left_out.append(f"thread_num = {threads}: the profile {error.what}")
        return strategy
    return advised


def _hierarchy(strategy: DistributedStrategy, experiment: Experiment, left_out: list[str]) -> DistributedStrategy:
    cluster = experiment.cluster
    if cluster.nodes == 1:
        return strategy
    if cluster.trainers_per_node == 1:
        left_out.append("hierarchical all-reduce: one trainer a node leaves nothing to reduce inside it")
    elif "strategy.use_hierarchical_allreduce" not in PLANNED:
        left_out.append(f"hierarchical all-reduce: {NOT_EXECUTED}")
    else:
        return strategy.replace(use_hierarchical_allreduce=True, hierarchical_inner_ranks=cluster.trainers_per_node)
    return strategy


def _local_sgd(strategy: DistributedStrategy, experiment: Experiment, left_out: list[str]) -> DistributedStrategy:
    workload, what = experiment.workload, "Local SGD after the first decay of the learning rate"
    if not workload.lr_decay:
        left_out.append(f"{what}: workload.lr_decay names none")
        return strategy
    first = min(decay.step for decay in workload.lr_decay)
    measured = min(experiment.tune.leg_steps, experiment.tune.simulated_steps)
    if workload.target_loss is None:
        left_out.append(f"{what}: no workload.target_loss prices it")
    elif first >= measured:
        left_out.append(f"{what}: step {first} lies behind the {measured} steps that are measured")
    else:
        try:
            advised = strategy.replace(localsgd=True, localsgd_configs={"k_steps": LOCAL_STEPS, "begin_step": max(first, 1)})
            check_strategy(advised, workload, experiment.cluster)
        except ConfigError as error:
            left_out.append(f"{what}: {error.what}")
        else:
            return advised
    return strategy
