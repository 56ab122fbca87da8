"""Which strategy executes a ``DistributedStrategy``."""

from __future__ import annotations

from fleetbench.plan.adaptive import adaptive_of
from fleetbench.plan.build import Plan
from fleetbench.plan.cadence import cadence_of
from fleetbench.plan.scaler import LossScaler
from fleetbench.plan.steps import Combination
from fleetbench.plan.training import Accumulation, CollectiveTraining
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import leaf_fields

_NOT_PLANNED = ("mode", "auto", "a_sync", "a_sync_configs")

PLANNED: frozenset[str] = frozenset(
    name for name in leaf_fields(DistributedStrategy(), "strategy") if name.split(".")[1] not in _NOT_PLANNED
)
"""Dotted names of the fields that executors of a plan carry out; the others are refused when changed."""


def family(strategy: DistributedStrategy, plan: Plan) -> CollectiveTraining:
    """The strategy that decides for trainers under ``strategy``."""
    merge, averaging, adaptive = strategy.gradient_merge_configs, strategy.averaging, adaptive_of(strategy)
    combination = Combination(
        plan=plan,
        is_local=strategy.is_local,
        merges=strategy.gradient_merge and merge.k_steps > 1,
        averages_gradient=merge.avg,
        updates_by_bucket=not strategy.build_strategy.enable_backward_optimizer_op_deps,
        finds_unused=strategy.find_unused_parameters,
        scales=strategy.scales_loss,
        holds_statistics=strategy.gradient_merge and merge.batch_norm_per == "update",
        averages_state=strategy.averages_state,
        resets_state=averaging.momentum == "reset",
        averages_buffers=averaging.buffers == "average",
        adapts=adaptive is not None,
    )
    return CollectiveTraining(
        combination,
        Accumulation(steps=merge.k_steps if strategy.gradient_merge else 1, remainder=merge.remainder),
        cadence=cadence_of(strategy) if strategy.is_local else None,
        adaptive=adaptive,
        scaler=LossScaler(strategy.amp_configs) if strategy.scales_loss else None,
        observes=(adaptive.observes if adaptive else frozenset()) | ({"found_inf"} if strategy.scales_loss else set()),
    )
