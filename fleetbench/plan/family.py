"""Which strategy executes a ``DistributedStrategy``."""

from __future__ import annotations

from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.training import CollectiveTraining
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import leaf_fields

_NOT_PLANNED = ("mode", "auto", "a_sync", "a_sync_configs")

PLANNED: frozenset[str] = frozenset(
    name for name in leaf_fields(DistributedStrategy(), "strategy") if name.split(".")[1] not in _NOT_PLANNED
)
"""Dotted names of the fields that executors of a plan carry out; the others are refused when changed."""


def family(strategy: DistributedStrategy, plan: Plan) -> CollectiveTraining:
    """The strategy that decides for trainers under ``strategy``."""
    return CollectiveTraining(plan, Combination.of(strategy))
