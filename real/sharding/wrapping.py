"""Wrapping: blocks of a model become torch's FSDP modules, on a mesh of shard groups and replicas."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fleetbench.errors import ConfigError
from fleetbench.plan.layers import Gradient
from fleetbench.plan.sharding import REST, block_of, blocks_of, degree_of, grouped_by_block, groups_of
from fleetbench.quantities import Nanoseconds
from fleetbench.sharding_configs import ShardingConfigs
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import refuse_unexecuted
from real.communication.communicators import Communicators

_FIELDS = """
sharding sharding_configs.stage sharding_configs.sharding_degree sharding_configs.reshard_after_forward
sharding_configs.blocks fp16_allreduce bf16_allreduce lr_scale sync_batch_norm thread_num broadcast_buffers
gradient_merge gradient_merge_configs.k_steps gradient_merge_configs.avg gradient_merge_configs.lr_per
amp amp_configs.dtype amp_configs.init_loss_scaling amp_configs.incr_every_n_steps amp_configs.incr_ratio
amp_configs.decr_every_n_nan_or_inf amp_configs.decr_ratio amp_configs.use_dynamic_loss_scaling
recompute recompute_configs.checkpoints build_strategy.fuse_all_optimizer_ops fetch_every_n_steps
cudnn_exhaustive_search conv_workspace_size_limit fraction_of_gpu_memory_to_use
"""
EXECUTED = frozenset(f"strategy.{name}" for name in _FIELDS.split())
"""Fields that a sharded training carries out; every other one is refused by name where it is changed."""


def refuse_unshardable_strategy(strategy: DistributedStrategy, trainers: int) -> None:
    """Raise ``ConfigError`` for a strategy that a sharded training of so many trainers does not carry out."""
    hint = "leave it at its default, or leave sharding out"
    refuse_unexecuted(strategy, "strategy", EXECUTED, "a sharded training", hint)
    degree, configs = degree_of(strategy.sharding_configs, trainers), strategy.sharding_configs
    half = next((name for name in ("fp16_allreduce", "bf16_allreduce") if getattr(strategy, name)), None)
    if half and strategy.gradient_merge_configs.k_steps > 1 and (configs.stage == 1 or degree < trainers):
        why = "would add up the gradients of several micro-batches in 16 bits, which loses most of them"
        hint = "leave the 16-bit wire or gradient_merge out; or set stage = 2 or 3 and sharding_degree = 0"
        raise ConfigError(why, f"strategy.{half}", "true", hint)


def refuse_unshardable_model(model: nn.Module, strategy: DistributedStrategy, sparse: Collection[str]) -> None:
    """Raise ``ConfigError`` for parameters that no block can gather; ``sparse``: names of sparse ones."""
    blocks = strategy.sharding_configs.blocks
    gradients = [
        Gradient(
            name=name,
            numel=own.numel(),
            dtype=str(own.dtype).removeprefix("torch."),
            sparse=name in sparse,
            ready=Nanoseconds(0),
        )
        for name, own in reversed([*model.named_parameters()])
        if own.requires_grad
    ]
    grouped_by_block(gradients, strategy, [name for name, _ in model.named_parameters()])
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
        if not own.dim():
            hint = "make it a tensor of one element: torch.nn.Parameter(torch.zeros(1))"
            what = "is a single number, and has no rows to shard"
            raise ConfigError(what, f"parameter {name}", "shape []", hint)


def mesh_of(configs: ShardingConfigs, communicators: Communicators) -> DeviceMesh:
    """All trainers where they are a shard group; else replicas x trainers of a group. Every rank calls it."""
    trainers = communicators.trainers
    degree, kind = degree_of(configs, trainers), communicators.device.type
    if degree == trainers:
        return DeviceMesh.from_group(communicators.world, kind)
    groups = groups_of(configs, trainers)
    alone = tuple((rank,) for rank in range(trainers))
    parts = {"shard": groups.get("shard", alone), "replica": groups.get("replica", groups["world"])}
    communicators.require(1, parts)
    made = [communicators.group(name) for name in ("replica", "shard")]
    ranks = torch.tensor(parts["shard"], device="cpu")
    return DeviceMesh.from_group(made, kind, ranks, mesh_dim_names=("replica", "shard"))


def shard(model: nn.Module, strategy: DistributedStrategy, communicators: Communicators) -> list[Any]:
    """Shard the model in place; its FSDP modules, the model first, then blocks in the order of the forward.

    Raises ``ConfigError`` for a block that is no module with a forward.
    """
    configs = strategy.sharding_configs
    named = blocks_of((name for name, _ in model.named_parameters()), configs.blocks)
    blocks = {name: model.get_submodule(name) for name in named if name != REST}
    for name, module in blocks.items():
        if type(module).forward is nn.Module.forward:
            hint = "name in sharding_configs.blocks the modules that the forward calls"
            raise ConfigError(
                "holds modules and has no forward, whose begin gathers a block",
                f"block {name}",
                type(module).__name__,
                hint,
            )
    mesh, last = mesh_of(configs, communicators), next(reversed(blocks), None)
    for name in sorted(blocks, key=lambda name: -name.count(".")):  # a block before one that it lies in
        stays = configs.stage < 3 or name == last
        again = False if stays else configs.reshard_after_forward
        policy = _policy(blocks[name], strategy)
        fully_shard(blocks[name], mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=_policy(model, strategy))
    modules: list[Any] = [model, *blocks.values()]
    for before, after in pairwise(modules):  # in the backward it does so by itself
        before.set_modules_to_forward_prefetch([after])
    if communicators.device.type == "cpu":  # there are no streams, in which what is gathered ahead would run
        modules[0]._set_unshard_async_op(True)  # noqa: SLF001  # torch has no public name for it
    return modules


def _policy(module: nn.Module, strategy: DistributedStrategy) -> MixedPrecisionPolicy:
    """Gradients travel in the 16 bits that were asked for, if parameters have more."""
    wire = torch.float16 if strategy.fp16_allreduce else torch.bfloat16 if strategy.bf16_allreduce else None
    own = next((parameter.dtype for parameter in module.parameters() if parameter.requires_grad), None)
    is_smaller = wire is not None and own is not None and wire.itemsize < own.itemsize
    return MixedPrecisionPolicy(reduce_dtype=wire if is_smaller else None)
