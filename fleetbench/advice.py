"""Advice: what Fleet's documents would use here, as a strategy to start from or to measure beside the default.

The rules are the documents' own: buckets of a tenth of the gradients' bytes; on one node one
communicator and one thread, on several two communicators and a thread more than those; on several
nodes a hierarchy over the trainers of a node; Local SGD after the first decay of the learning
rate; a fused optimizer; mixed precision. What does not fit the workload, the cluster or the
strategy that is built on is left out and listed.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.experiment import check_strategy
from fleetbench.plan.family import PLANNED
from fleetbench.plan.layers import declared_table
from fleetbench.quantities import MIB
from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from fleetbench.workload import LAYERS, Workload

LOCAL_STEPS = 2
"""The smaller of the two values of K that the documents report."""
FUSED_SHARE = 0.1
"""Of the gradients' bytes, in one bucket."""
NOT_EXECUTED = "not executed here yet"

HIERARCHY = "hierarchical all-reduce"
LOCAL_SGD = "Local SGD after the first decay of the learning rate"
OP_FUSION = "op fusion"
MIXED_PRECISION = "mixed precision"
_OTHER_SCHEDULES = ("schedule", "warmup_epochs", "warmup")


class Advice(NamedTuple):
    """Fleet's advice, and what was left out of it, each line with its reason."""

    strategy: DistributedStrategy
    left_out: tuple[str, ...]


def advice(
    workload: Workload,
    cluster: Cluster,
    gradient_bytes: int | None = None,
    *,
    device: str = "cpu",
    base: DistributedStrategy | None = None,
    executes: AbstractSet[str] = PLANNED,
) -> Advice:
    """Fleet's advice for a workload on a cluster, on top of ``base`` (default: Fleet's defaults).

    ``gradient_bytes`` are those of the dense gradients of one step; a table of layers gives its own.
    ``device`` is ``run.device``. ``executes`` holds the dotted names of the fields that may be set.
    """
    rules = _Rules(workload, cluster, base or DistributedStrategy(), executes)
    rules.fusion(gradient_bytes)
    rules.communicators()
    rules.hierarchy()
    rules.local_sgd()
    rules.op_fusion()
    rules.mixed_precision(device)
    return Advice(rules.strategy, tuple(rules.left_out))


class _Rules:
    """The strategy that grows rule by rule, and what was left out of it so far."""

    def __init__(self, workload: Workload, cluster: Cluster, base: DistributedStrategy, executes: AbstractSet[str]) -> None:
        self.workload = workload
        self.cluster = cluster
        self.strategy = base
        self.executes = executes
        self.left_out: list[str] = []

    def fusion(self, gradient_bytes: int | None) -> None:
        if gradient_bytes is None and self.workload.model == LAYERS:
            gradient_bytes = sum(gradient.nbytes for gradient in declared_table(self.workload).by_readiness())
        if gradient_bytes is None:
            self.left_out.append("fusion size: a tenth of the gradients' bytes, which are not known")
        elif gradient_bytes > 0:
            plain = DistributedStrategy()
            self._apply(
                "fusion size",
                fuse_all_reduce_ops=True,
                fusion="fleet",
                fuse_grad_size_in_num=plain.fuse_grad_size_in_num,
                last_comm_group_size_MB=plain.last_comm_group_size_MB,
                fuse_grad_size_in_MB=float(f"{FUSED_SHARE * gradient_bytes / MIB:.4g}"),
            )

    def communicators(self) -> None:
        several = self.cluster.nodes > 1
        count = 2 if several else 1
        self._apply(f"nccl_comm_num = {count}", nccl_comm_num=count, sync_nccl_allreduce=not several)
        threads = self.strategy.nccl_comm_num + 1 if several else 1
        self._apply(f"thread_num = {threads}", thread_num=threads)

    def hierarchy(self) -> None:
        inner = self.cluster.trainers_per_node
        if self.cluster.nodes == 1:
            return
        if inner == 1:
            self.left_out.append(f"{HIERARCHY}: one trainer a node leaves nothing to reduce inside it")
        else:
            self._apply(HIERARCHY, use_hierarchical_allreduce=True, hierarchical_inner_ranks=inner)

    def local_sgd(self) -> None:
        steps = [decay.step for decay in self.workload.lr_decay]
        if not steps:
            self.left_out.append(f"{LOCAL_SGD}: workload.lr_decay names none")
        elif min(steps) >= self.workload.steps:
            self.left_out.append(f"{LOCAL_SGD}: step {min(steps)} lies behind the {self.workload.steps} steps of the workload")
        else:
            plain, base = LocalSGDConfigs(), self.strategy.localsgd_configs
            reset = {name: getattr(plain, name) for name in _OTHER_SCHEDULES if getattr(base, name) != getattr(plain, name)}
            self._apply(LOCAL_SGD, localsgd=True, localsgd_configs={"k_steps": LOCAL_STEPS, "begin_step": min(steps), **reset})

    def op_fusion(self) -> None:
        """Of the optimizer's operators only: the others are fused by a compiler, whose time no document counts."""
        self._apply(OP_FUSION, build_strategy={"fuse_all_optimizer_ops": True})

    def mixed_precision(self, device: str) -> None:
        if device != "cuda":
            self.left_out.append(f"{MIXED_PRECISION}: it is GPUs whose FP16 is faster, and run.device is {device}")
        elif self.workload.dtype != "float32":
            self.left_out.append(f"{MIXED_PRECISION}: workload.dtype asks for {self.workload.dtype}")
        else:
            self._apply(MIXED_PRECISION, amp=True)

    def _apply(self, what: str, **changes: Any) -> None:
        """Take changes over where they can be executed and contradict nothing; list them otherwise."""
        names = [f"{name}.{key}" for name, value in changes.items() if isinstance(value, dict) for key in value]
        names += [name for name, value in changes.items() if not isinstance(value, dict)]
        if not all(f"strategy.{name}" in self.executes for name in names):
            self.left_out.append(f"{what}: {NOT_EXECUTED}")
            return
        try:
            advised = self.strategy.replace(**changes)
            check_strategy(advised, self.workload, self.cluster)
        except ConfigError as error:
            self.left_out.append(f"{what}: {error.what}")
        else:
            self.strategy = advised
