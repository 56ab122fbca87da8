"""Advice: the strategy that Fleet's documents recommend, as a starting point or for comparison.

The rules are those of the documents: buckets of a tenth of the gradients' bytes; on one node one communicator
and one thread; on several nodes two communicators, one thread more than communicators, and a hierarchy over
the trainers of a node; Local SGD after the first decay of the learning rate; a fused optimizer; mixed
precision. Rules that do not fit the workload, the cluster or the base strategy are left out and listed.
"""

from typing import Any, NamedTuple

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.experiment import check_strategy
from fleetbench.plan.layers import declared_table
from fleetbench.quantities import MIB
from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from fleetbench.workload import LAYERS, LINEAR_OPTIMIZERS, Workload

LOCAL_STEPS = 2
"""Local steps per round, K: the smaller of the two values in the documents."""
FUSED_SHARE = 0.1
"""Share of the gradients' bytes in one bucket."""

HIERARCHY = "hierarchical all-reduce"
LOCAL_SGD = "Local SGD after the first decay of the learning rate"
OP_FUSION = "op fusion"
MIXED_PRECISION = "mixed precision"


Rule = dict[str, Any] | str
"""Strategy fields that a rule changes, or the reason why the rule is left out."""


class Advice(NamedTuple):
    """Fleet's advice, and the rules that were left out, with reasons."""

    strategy: DistributedStrategy
    """Strategy with the advised changes."""
    left_out: tuple[str, ...]
    """Rules that were left out, each with its reason."""


def advice(
    workload: Workload,
    cluster: Cluster,
    gradient_bytes: int | None = None,
    *,
    device: str = "cpu",
    base: DistributedStrategy | None = None,
) -> Advice:
    """Return Fleet's advice for a workload on a cluster, on top of ``base`` (default: Fleet's defaults).

    ``gradient_bytes`` is the total size of the dense gradients. For ``model = "layers"``, its default is
    their size in the table of layers. ``device`` is ``run.device``.
    """
    strategy = base or DistributedStrategy()
    left_out: list[str] = []
    several = cluster.nodes > 1

    def consider(what: str, rule: Rule) -> None:
        """Apply a rule's changes, or add the rule to ``left_out`` if they contradict other settings."""
        nonlocal strategy
        if isinstance(rule, str):
            left_out.append(f"{what}: {rule}")
        else:
            try:
                advised = strategy.replace(**rule)
                check_strategy(advised, workload, cluster)
            except ConfigError as error:
                left_out.append(f"{what}: {error.what}")
            else:
                strategy = advised

    consider("fusion size", "one trainer exchanges nothing" if cluster.trainers == 1 else _fusion(workload, gradient_bytes))
    count = 2 if several else 1
    consider(f"nccl_comm_num = {count}", {"nccl_comm_num": count, "sync_nccl_allreduce": not several})
    threads = strategy.nccl_comm_num + 1 if several else 1
    consider(f"thread_num = {threads}", {"thread_num": threads})
    if several and (inner := cluster.trainers_per_node) > 1:
        consider(HIERARCHY, {"use_hierarchical_allreduce": True, "hierarchical_inner_ranks": inner})
    elif several:
        consider(HIERARCHY, "with one trainer per node there is nothing to reduce inside a node")
    consider(LOCAL_SGD, _local_sgd(workload))
    # only the optimizer's operators: a compiler would fuse the others, and the documents do not count its time
    consider(OP_FUSION, {"build_strategy": {"fuse_all_optimizer_ops": True}})
    consider(MIXED_PRECISION, _mixed_precision(workload, device))
    return Advice(strategy, tuple(left_out))


def _fusion(workload: Workload, gradient_bytes: int | None) -> Rule:
    if gradient_bytes is None and workload.model == LAYERS:
        gradient_bytes = sum(gradient.nbytes for gradient in declared_table(workload).by_readiness())
    if gradient_bytes is None:
        return "a tenth of the gradients' bytes, which are not known"
    if gradient_bytes == 0:
        return {}
    plain = DistributedStrategy()
    return {
        "fuse_all_reduce_ops": True,
        "fusion": "fleet",
        "fuse_grad_size_in_num": plain.fuse_grad_size_in_num,
        "last_comm_group_size_MB": plain.last_comm_group_size_MB,
        "fuse_grad_size_in_MB": float(f"{FUSED_SHARE * gradient_bytes / MIB:.4g}"),
    }


def _local_sgd(workload: Workload) -> Rule:
    if workload.optimizer not in LINEAR_OPTIMIZERS:
        return "Fleet averages parameters only under sgd and momentum"
    first = min((decay.step for decay in workload.lr_decay), default=None)
    if first is None:
        return "workload.lr_decay names none"
    if first >= workload.steps:
        return f"step {first} lies after the {workload.steps} steps of the workload"
    plain = {name: getattr(LocalSGDConfigs(), name) for name in ("schedule", "warmup_epochs", "warmup")}
    return {"localsgd": True, "localsgd_configs": {"k_steps": LOCAL_STEPS, "begin_step": first, **plain}}


def _mixed_precision(workload: Workload, device: str) -> Rule:
    if device != "cuda":
        return f"it is GPUs whose FP16 is faster, and run.device is {device}"
    if workload.dtype != "float32":
        return f"workload.dtype asks for {workload.dtype}"
    return {"amp": True}
