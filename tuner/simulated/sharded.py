"""Sharded strategies that --simulate-only tries, and the memory that a trainer needs under any strategy."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.hardware import gpu_named
from fleetbench.plan.build import Plan, build_plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.layers import DTYPE_BYTES
from fleetbench.plan.sharding import blocks_of
from fleetbench.profile import profile_of, table_for
from fleetbench.strategy import DistributedStrategy
from sim import scenario
from tuner.notes import Note, left_out
from tuner.pytorch import UNSHARDED
from tuner.space import needs

_MOST_BY_EVENTS = 8
"""Largest number of trainers with which candidates are tried that the array engine does not run."""


def candidates(experiment: Experiment) -> tuple[list[DistributedStrategy], list[Note]]:
    """Return the sharded strategies to try, and notes about what is not tried.

    They are the stages of ``tune.sharding``, over all trainers, within a node, and in groups of the own size.
    Without merged gradients, stages 1, 2, and 3 without resharding run the same operations: one is tried.
    """
    cluster, own, found = experiment.cluster, experiment.strategy, list[DistributedStrategy]()
    if own.mode == "ps" or cluster.trainers == 1:
        return [], []
    base = own.without(*UNSHARDED)
    degrees = [0]
    if cluster.is_even and 1 < cluster.trainers_per_node < cluster.trainers:
        degrees.append(cluster.trainers_per_node)
    merges, stages = Combination.of(base).merges, experiment.tune.sharding
    kept: list[dict[str, Any]] = [
        {"stage": stage} for stage in stages if stage < 3 and (merges or stage == max(one for one in stages if one < 3))
    ]
    configs = [*kept, *([{"stage": 3}] if 3 in stages else [])]
    configs += [{"stage": 3, "reshard_after_forward": False}] if 3 in stages and (merges or not kept) else []
    notes = list[Note]()
    if 3 in stages and 1 < cluster.trainers_per_node < cluster.trainers and cluster.is_even:
        if cluster.trainers <= _MOST_BY_EVENTS:
            configs.append({"stage": 3, "reshard_after_forward": cluster.trainers_per_node})
        else:
            what = f"sharding with blocks spread within a node (reshard_after_forward = {cluster.trainers_per_node})"
            why = "it is simulated event by event, which takes minutes with so many trainers: fleetbench sim simulates one"
            notes.append(left_out(what, "is not tried", why))
    for one in configs:
        for degree in dict.fromkeys([*degrees, *([own.sharding_configs.sharding_degree] if own.sharding else [])]):
            asked = own.sharding_configs
            if type(one.get("reshard_after_forward")) is int and degree:  # a node is the shard group
                continue
            also = {"sharding_degree": degree, "blocks": list(asked.blocks), "param_dtype": asked.param_dtype}
            try:
                strategy = base.replace(sharding=True, sharding_configs=one | also)
                plan_of(experiment.replace(strategy=strategy))
            except ConfigError as error:  # such as a sparse gradient, or a field that excludes sharding
                return [], [left_out("sharding", "is not tried", error)]
            found += _with_wires(experiment, strategy)
    return [strategy for strategy in found if strategy != own], notes


def _with_wires(experiment: Experiment, strategy: DistributedStrategy) -> list[DistributedStrategy]:
    """Return the strategy, and if gradients may be rounded, also the strategy with gradients in BF16."""
    is_free, _ = needs(experiment)["rounding"]
    is_short = strategy.fp16_allreduce or strategy.bf16_allreduce
    if not is_free or is_short or all(DTYPE_BYTES[one.dtype] <= 2 for one in table_for(experiment).by_readiness()):
        return [strategy]
    return [strategy, strategy.replace(bf16_allreduce=True)]


def recomputed(experiment: Experiment) -> list[DistributedStrategy]:
    """Return the own strategy and the ``candidates``, recomputing every block, if none fits without that."""
    names = [gradient.name for layer in table_for(experiment).layers for gradient in layer.gradients]
    blocks, tried = [name for name in blocks_of(names) if name], [experiment.strategy, *candidates(experiment)[0]]
    if experiment.strategy.recompute or not blocks or any(fits(experiment.replace(strategy=one)) is not False for one in tried):
        return []
    return [one.replace(recompute=True, recompute_configs={"checkpoints": blocks}) for one in tried]


def is_timed(experiment: Experiment) -> bool:
    """Whether the experiment's layer table is known: declared, or in its profile."""
    try:
        table_for(experiment)
    except ConfigError:
        return False
    return True


def of_script(experiment: Experiment) -> list[DistributedStrategy]:
    """Return the strategies that a script's calls of ``fully_shard`` can have, its own first.

    After their forward, blocks are resharded, resharded within their node, or kept. If a shard group is all
    trainers, smaller ones are added, which are replicas of each other; and gradients in BF16, if they may be
    rounded.
    """
    own, trainers = experiment.strategy, experiment.cluster.trainers
    configs = own.sharding_configs
    degrees = [configs.sharding_degree]
    if not configs.sharding_degree:
        degrees += [degree for degree in range(2, trainers) if trainers % degree == 0]
    within = experiment.cluster.trainers_per_node
    is_spread = not configs.sharding_degree and 1 < within < trainers <= _MOST_BY_EVENTS and experiment.cluster.is_even
    within_node = [within] if is_spread else []
    found = [
        own.replace(sharding_configs=dataclasses.replace(configs, sharding_degree=degree, reshard_after_forward=again))
        for degree in degrees
        for again in dict.fromkeys([configs.reshard_after_forward, True, False, *within_node])
        if type(again) is bool or degree == configs.sharding_degree
    ]
    return list(dict.fromkeys(each for one in [own, *found] for each in _with_wires(experiment, one)))


def name_of(strategy: DistributedStrategy) -> str:
    """Describe a sharded strategy in words."""
    configs = strategy.sharding_configs
    within = f" among {configs.sharding_degree} neighbours" if configs.sharding_degree else ""
    wire = ", gradients in BF16" if strategy.bf16_allreduce else ""
    return f"reshard_after_forward = {configs.reshard_after_forward}{within}{wire}"


def plan_of(experiment: Experiment) -> Plan:
    """Return the plan of an experiment with known layer times. Raises ``ConfigError`` if there is none."""
    table = table_for(experiment)
    return build_plan(experiment.strategy, table.by_readiness(), scenario.setting_of(experiment, table))


def memory_of(experiment: Experiment) -> dict[str, int] | None:
    """Return a trainer's memory in bytes by content, as in ``trainer_bytes``; None if no profile has it."""
    profile = profile_of(experiment)
    return None if profile is None or profile.memory is None else scenario.memory_of(experiment, plan_of(experiment))


def fits(experiment: Experiment) -> bool | None:
    """Whether a trainer fits into its GPU's memory; None if its need or the GPU is unknown."""
    found, gpu = memory_of(experiment), experiment.cluster.gpu
    return None if found is None or gpu is None else sum(found.values()) <= gpu_named(gpu, "cluster.gpu").memory


def fitting(experiment: Experiment, strategies: Iterable[DistributedStrategy]) -> list[DistributedStrategy]:
    """Return the strategies that fit into a trainer's memory, or may fit; all of them if none does."""
    asked = list(strategies)
    return [one for one in asked if fits(experiment.replace(strategy=one)) is not False] or asked
