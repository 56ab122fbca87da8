"""Which strategy executes a ``DistributedStrategy``."""

from __future__ import annotations

from fleetbench.plan.build import Plan
from fleetbench.plan.cadence import cadence_of
from fleetbench.plan.local_sgd import LocalSGD
from fleetbench.plan.protocol import Strategy
from fleetbench.plan.synchronous import Synchronous
from fleetbench.strategy import DistributedStrategy

PLANNED: frozenset[str] = frozenset(
    f"strategy.{name}"
    for name in (
        "fuse_all_reduce_ops",
        "fusion",
        "fuse_grad_size_in_MB",
        "fuse_grad_count",
        "fuse_grad_size_in_num",
        "last_comm_group_size_MB",
        "sync_nccl_allreduce",
        "nccl_comm_num",
        "thread_num",
        "localsgd",
        "localsgd_configs.k_steps",
        "localsgd_configs.begin_step",
    )
)
"""Dotted names of the fields that every executor of a plan carries out today; the others are refused when changed."""


def family(strategy: DistributedStrategy, plan: Plan) -> Strategy:
    """The strategy that decides for trainers under ``strategy``."""
    if strategy.localsgd:
        return LocalSGD(plan, cadence_of(strategy))
    return Synchronous(plan)
