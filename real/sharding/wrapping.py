"""Wrapping: blocks of a model become torch's FSDP modules, on a mesh of shard groups and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan
from fleetbench.plan.sharding import REST, Block, block_of, blocks_of
from fleetbench.sharding_configs import ShardingConfigs
from real.communication.communicators import Communicators


def refuse_unshardable_model(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise ``ConfigError`` for parameters that no block can gather; ``blocks``: names from the strategy."""
    first: dict[int, str] = {}
    for name, own in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(own), name)
        if block_of(other, blocks) != block_of(name, blocks):
            hint = "name blocks in sharding_configs.blocks that hold both, or neither"
            raise ConfigError(
                "is shared by two blocks, which are gathered at different times",
                f"parameter {other}",
                name,
                hint,
            )


def mesh_of(plan: Plan, communicators: Communicators) -> DeviceMesh:
    """Return the device mesh of ``fully_shard``; every rank calls it.

    It has all trainers if they form one shard group, else replicas x trainers of a shard group. With workers that
    update alone, it has the worker's own shard group.
    """
    trainers, kind = plan.trainers, communicators.device.type
    if plan.shard_ranks == trainers:
        return DeviceMesh.from_group(communicators.world, kind)
    alone = tuple((rank,) for rank in range(trainers))
    parts = {name: plan.parts.get(name, other) for name, other in (("shard", alone), ("replica", plan.parts["world"]))}
    communicators.require(1, parts)
    if any(operation.payload == "delta" for operation in plan.exchange):
        return DeviceMesh.from_group(communicators.group("shard"), kind)
    made = [communicators.group(name) for name in ("replica", "shard")]
    ranks = torch.tensor(parts["shard"], device="cpu")
    return DeviceMesh.from_group(made, kind, ranks, mesh_dim_names=("replica", "shard"))


def shard(model: nn.Module, plan: Plan, configs: ShardingConfigs, communicators: Communicators) -> list[Any]:
    """Shard the model in place, block by block of the plan.

    Returns its FSDP modules: the model first, then blocks in the order of the forward.
    """
    of_plan = {block.name: block for block in plan.blocks}
    in_order = blocks_of((name for name, _ in model.named_parameters()), configs.blocks)  # including entirely frozen ones
    named = {name: model.get_submodule(name) for name in in_order if name != REST}
    mesh = mesh_of(plan, communicators)
    for name in sorted(named, key=lambda name: -name.count(".")):  # inner blocks before outer ones
        stays = configs.stage < 3 or (name in of_plan and not of_plan[name].regathers)
        again = False if stays else configs.reshard_after_forward
        policy = _policy(named[name], plan, of_plan.get(name), configs)
        fully_shard(named[name], mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=_policy(model, plan, of_plan.get(REST), configs))
    modules: list[Any] = [model, *named.values()]
    for before, after in pairwise(modules):  # in the backward, torch prefetches by itself
        before.set_modules_to_forward_prefetch([after])
    if communicators.device.type == "cpu":  # without streams, gathers ahead must be asynchronous
        modules[0]._set_unshard_async_op(True)  # noqa: SLF001  # torch has no public name for it
    return modules


def _policy(module: nn.Module, plan: Plan, block: Block | None, configs: ShardingConfigs) -> MixedPrecisionPolicy:
    """Return the types in which torch exchanges a block: parameters by the strategy, gradients by the plan."""
    own = next((parameter.dtype for parameter in module.parameters() if parameter.requires_grad), None)
    chain = () if block is None else plan.of_bucket.get(block.bucket, ())
    wire = next((getattr(torch, one.wire_dtype) for one in chain if one.wire_dtype is not None), own)
    short = None if configs.param_dtype == "own" else getattr(torch, configs.param_dtype)
    if short is None or own is None or short.itemsize >= own.itemsize:
        return MixedPrecisionPolicy(reduce_dtype=None if wire == own else wire)
    return MixedPrecisionPolicy(param_dtype=short, reduce_dtype=wire)
