"""Sharded: runs the legs of a driver in a process whose script calls ``fully_shard``; legs may change its arguments."""

from __future__ import annotations

import dataclasses
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fleetbench.errors import ConfigError
from fleetbench.plan.sharding import degree_of
from fleetbench.strategy import DistributedStrategy
from real.fully_shard import WHERE, ShardedModel, is_unit, mixed
from real.job.driver_watch import watch_driver
from real.job.folder import RankSide
from real.leg import Leg
from real.processes.attached import note_attached
from real.processes.roles import TUNING

if TYPE_CHECKING:
    from real.attach.job import Job
    from real.attach.optimizers import Optimizer
    from real.collective import Collective
    from real.sharded_legs import ShardedSwitch


class Sharded:
    """Applies a driver's legs to the model that a script shards with ``fully_shard``.

    Life cycle: created when ``fully_shard`` is imported -> ``is_attached`` at the first forward of a model
    that an optimizer may follow. Calls of ``fully_shard`` get the strategy of the driver's first leg; another one
    needs another launch.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.is_attached = False
        self._switch: ShardedSwitch | None = None
        self._collective: Collective | None = None
        self._model: ShardedModel | None = None
        self._has_mesh = False
        """Whether calls of ``fully_shard`` were given a mesh of the strategy."""
        self._has_own_mesh = False
        """Whether the script passes a mesh to ``fully_shard``."""

    def arguments(self, unit: Any, named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of ``fully_shard``, changed to those of the strategy.

        These are the mesh, unless the script passes one; the type on the wire; and the number of neighbours
        over which an innermost unit reshards after its forward.
        """
        self._has_own_mesh |= named.get("mesh") is not None
        strategy = _ordered() if self._job.may_attach() else None
        if strategy is None:
            return named
        configs, world = strategy.sharding_configs, dist.get_world_size()
        changed: dict[str, Any] = {}
        if named.get("mesh") is None and (degree := degree_of(configs, world)) < world:
            changed["mesh"], self._has_mesh = _mesh(degree), True
        is_inner = not isinstance(unit, (list, tuple)) and not any(map(is_unit, unit.modules()))
        if is_inner and type(configs.reshard_after_forward) is int:
            changed["reshard_after_forward"] = configs.reshard_after_forward
        if wire := torch.float16 if strategy.fp16_allreduce else torch.bfloat16 if strategy.bf16_allreduce else None:
            from torch.distributed.fsdp import MixedPrecisionPolicy  # which is being imported when this module is

            changed["mp_policy"] = dataclasses.replace(named.get("mp_policy") or MixedPrecisionPolicy(), reduce_dtype=wire)
        return named | changed

    def around(self, model: ShardedModel, inputs: tuple[Any, ...], named: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return the context of a model's forward; attach the model at its first forward with gradients."""
        is_new = model is not self._model and torch.is_grad_enabled() and self._job.may_attach()
        if is_new and (optimizers := self._job.optimizers.holding(model.module)):
            if not self.is_attached:
                watch_driver(dist.get_rank())  # reports errors to the driver
            self._attach(model, optimizers)
        return nullcontext() if self._switch is None or model is not self._model else self._switch.forward(inputs, named)

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's steps end the steps of a leg."""
        return self._switch is not None and self._switch.optimizer is optimizer

    def stepped(self) -> None:
        """Count a step during which the job began to follow the optimizer."""
        if self._collective is not None and self._collective.driven is not None:
            self._collective.driven.step_done()

    def _attach(self, model: ShardedModel, optimizers: list[Optimizer]) -> None:
        from real.attach.attaching import timeout_s  # which a script that only imports fully_shard need not pay for
        from real.collective import Collective
        from real.sharded_legs import ShardedSwitch

        model.has_own_mesh = self._has_own_mesh
        if self.is_attached:
            hint = "shard one model, by a call with the model itself after those with its blocks; freeze others without fully_shard"
            raise ConfigError("shards several models, and legs are of one", WHERE, type(model.module).__name__, hint)
        if self._job.attached is not None:
            raise mixed()
        if self._has_mesh:
            model.refuse_different_replicas()
        if len(optimizers) > 1:
            hint = "put all parameters into the groups of one optimizer"
            raise ConfigError("has several optimizers, and a step ends with one", WHERE, str(len(optimizers)), hint)
        self._model, self._collective = model, Collective(model.own_strategy(), timeout_s())
        driven, role = self._collective.driven, self._collective.role
        assert driven is not None
        self._switch = ShardedSwitch(model, optimizers[0], self._collective.communicators, role.trainers_per_node or 1)
        driven.begin(self._switch)
        self.is_attached = True
        note_attached()


@cache
def _ordered() -> DistributedStrategy | None:
    """Return the strategy of the driver's first leg; ``None`` if that is the script's own.

    Raises ``ConfigError`` without a driver, because a strategy's file would do what arguments do.
    """
    if TUNING not in os.environ:
        hint = "pass what recommended.md prints to the script's calls, or write fleet's four lines in their place"
        raise ConfigError("is applied to DistributedDataParallel, and the script calls fully_shard", "--strategy", hint=hint)
    leg = RankSide.of_environment().wait_for(0, Leg)
    return None if leg is None or leg.start == "as_is" else leg.strategy


@cache
def _mesh(degree: int) -> DeviceMesh:
    """Return a mesh of shard groups of ``degree`` neighbours and their replicas, on ``fully_shard``'s devices."""
    shape = (dist.get_world_size() // degree, degree)
    return init_device_mesh(torch._C._get_accelerator().type, shape, mesh_dim_names=("replicate", "shard"))  # noqa: SLF001  # as fully_shard does
