"""fully_shard: lets a ``Hearer`` follow calls of torch's ``fully_shard`` (FSDP2), and forwards of sharded models."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fleetbench.errors import ConfigError
from fleetbench.plan.layers import Gradient
from fleetbench.quantities import Nanoseconds
from fleetbench.sharding_configs import ShardingConfigs
from fleetbench.strategy import AmpConfigs, DistributedStrategy
from fleetbench.why.change import DdpChange
from fleetbench.why.observed import Model
from real.job.driver_watch import watch_driver
from real.processes.roles import TUNING

WHERE = "fully_shard"
"""Place that error messages name."""


class ShardedModel:
    """A model that its script has sharded: ``module``, whose forward runs first, and the units inside it.

    A unit is a module given to ``fully_shard``. ``change`` lets the innermost units reshard after their
    forward, or not, from the next step on; all others keep the script's arguments.
    """

    can_change = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.units = {name: each for name, each in module.named_modules() if is_unit(each)}
        """All units by name, the model itself first."""
        self.inner = {name: each for name, each in self.units.items() if name and not any(map(is_unit, [*each.modules()][1:]))}
        """Units without other units inside, by name, except the model itself."""
        self._names = {id(own): name for name, own in module.named_parameters()}
        self._own = {name: [group.post_forward_mesh_info for group in groups_of(each)] for name, each in self.inner.items()}
        self._threads = torch.get_num_threads()
        self.group: Any = dist.group.WORLD
        self.has_own_mesh = False
        """Whether the script itself passes a mesh to ``fully_shard``, so that the degree cannot be changed."""
        self.device_type: str = next(self.groups()).mesh_info.mesh.device_type

    def groups(self) -> Iterator[Any]:
        """Yield torch's parameter group of each unit; modules that form one unit together have one group."""
        found = {id(group): group for each in self.units.values() for group in groups_of(each)}
        return iter(found.values())

    def named(self, group: Any) -> Iterator[tuple[str, Any]]:
        """Yield each parameter of a group: its name in the model, and this rank's shard."""
        for own in group.fsdp_params:
            yield self._names[id(own.sharded_param)], own.sharded_param

    def gradients(self) -> list[Gradient]:
        """Return the trained parameters' gradients in the unit's widest type; the strategy names narrower types on the wire."""
        return [
            Gradient(name=name, numel=own.numel(), dtype=str(dtypes_of(group).widest).removeprefix("torch."), ready=Nanoseconds(0))
            for group in self.groups()
            for name, own in self.named(group)
            if own.requires_grad
        ]

    @contextmanager
    def gathered(self) -> Iterator[Callable[[], None]]:
        """Keep all parameters gathered inside the context, and exchange nothing.

        Yields a function that drops the gradients; the caller calls it after each step.
        """
        groups = list(self.groups())
        before = [(each.post_forward_mesh_info, each.reshard_after_backward, each.reduce_grads) for each in groups]

        def clear() -> None:
            for own in (each for group in groups for each in group.fsdp_params):
                own.unsharded_accumulated_grad = own.unsharded_param.grad = None

        for group in groups:
            group.post_forward_mesh_info, group.reshard_after_backward, group.reduce_grads = (
                None,
                False,
                False,
            )
        for unit in self.units.values():
            unit.unshard()
        try:
            yield clear
        finally:
            clear()
            for group, own in zip(groups, before, strict=True):
                group.post_forward_mesh_info, group.reshard_after_backward, group.reduce_grads = own
            for unit in self.units.values():
                unit.reshard()

    def change(self, change: DdpChange) -> None:
        """Apply the settings that ``change`` names, and the script's own for all others."""
        torch.set_num_threads(change.threads or self._threads)
        reshards = change.reshard_after_forward
        for name, unit in self.inner.items():
            for group, own in zip(groups_of(unit), self._own[name], strict=True):  # as torch's set_reshard_after_forward
                group.post_forward_mesh_info = own if reshards is None else group.mesh_info if reshards else None

    @property
    def reshards(self) -> bool | int:
        """Whether most of the inner units reshard after their forward, or over how many neighbours they do."""
        found = [_reshards(group) for each in self.inner.values() for group in groups_of(each)]
        return Counter(found).most_common(1)[0][0] if found else False

    @property
    def degree(self) -> int:
        """Number of ranks among which the model's parameters are sharded."""
        return int(next(self.groups()).mesh_info.shard_mesh_size)

    def described(self, *, buffers_change: bool) -> Model:
        """Return the model as an observer reports it: bytes gathered and scattered per step, and its type."""
        sizes = [(gathered_nbytes(group), group) for group in self.groups()]
        again = [nbytes for nbytes, group in sizes if group.post_forward_mesh_info is not None]
        return Model(
            nbytes=sum(scattered_nbytes(group) for _, group in sizes),
            bucket_nbytes=tuple(scattered_nbytes(group) for _, group in sizes),
            gathered_nbytes=sum(nbytes for nbytes, _ in sizes),
            regathered_nbytes=sum(again),
            shard_ranks=self.degree,
            buffers_change=buffers_change,
        )

    def own_strategy(self) -> DistributedStrategy:
        """Return the strategy that is equivalent to the script's calls.

        Raises ``ConfigError`` for calls that no strategy expresses.
        """
        self._refuse()
        trained = next(filter(_trains, self.groups()))
        gathered, scattered, widest = dtypes_of(trained)
        wire, is_short = scattered if scattered.itemsize < widest.itemsize else None, gathered.itemsize < widest.itemsize
        return DistributedStrategy(
            sharding=True,
            sharding_configs=ShardingConfigs(
                stage=3,
                sharding_degree=0 if self.degree == dist.get_world_size() and not self.has_own_mesh else self.degree,
                reshard_after_forward=self.reshards,
                param_dtype="bfloat16" if is_short else "own",
                blocks=tuple(name for name, each in self.units.items() if name and any(map(_trains, groups_of(each)))),
            ),
            amp=is_short,
            amp_configs=AmpConfigs(dtype="bf16") if is_short else AmpConfigs(),
            broadcast_buffers=False,
            thread_num=self._threads,
            fp16_allreduce=wire is torch.float16,
            bf16_allreduce=wire is torch.bfloat16,
        )

    @torch.no_grad()
    def refuse_different_replicas(self) -> None:
        """Raise ``ConfigError`` if replicas of a shard differ at the start.

        ``fully_shard`` leaves each rank the parameters that it has created. Without replicas, all ranks'
        parts form one model; with replicas, each would train another one.
        """
        mesh = next(self.groups()).mesh_info.mesh
        shards = [own.sharded_param.to_local().double() for group in self.groups() for own in group.fsdp_params]
        sums = torch.stack([torch.stack([each.sum(), each.square().sum()]) for each in shards])
        first = sums.clone()
        dist.broadcast(first, group=mesh.get_group(0), group_src=0)
        differs = (sums != first).any().int()
        dist.all_reduce(differs)
        if differs:
            hint = "give all ranks one seed before the model is made (torch.manual_seed), or load one checkpoint"
            raise ConfigError(
                "ranks begin from different parameters, and replicas (HSDP) would train different models",
                WHERE,
                hint=hint,
            )

    def _refuse(self) -> None:
        world = dist.get_world_size()
        together = [group for group in self.groups() if len(getattr(group, "modules", ())) > 1]
        if together:
            hint = "give each module a call of its own while the script is profiled, tuned or launched with a strategy"
            raise ConfigError("makes several modules one unit, which no strategy does", WHERE, str(len(together)), hint)
        meshes = {tuple(group.mesh_info.mesh.shape) for group in self.groups()}
        if len(meshes) > 1 or next(self.groups()).mesh_info.mesh.size() != world:
            hint = "give all calls one mesh, of all ranks: tensor, expert and pipeline parallelism are outside of strategies"
            raise ConfigError("is given meshes that no strategy has", WHERE, " and ".join(map(str, sorted(meshes))), hint)


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called with this module."""
    return hasattr(module, "_get_fsdp_state")


def groups_of(unit: nn.Module) -> list[Any]:
    """Return torch's parameter groups of a unit: one; none if other units have all its parameters; rarely several."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]  # noqa: SLF001  # torch has no public name for it
    found = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on
    return list(found) if found is not None else [each for each in [state._fsdp_param_group] if each is not None]  # noqa: SLF001  # as above


def _trains(group: Any) -> bool:
    return any(own.sharded_param.requires_grad for own in group.fsdp_params)


def _reshards(group: Any) -> bool | int:
    info = group.post_forward_mesh_info
    return False if info is None else True if info is group.mesh_info else int(info.shard_mesh_size)


class Dtypes(NamedTuple):
    """Types of a unit's parameters when gathered, of the gradients when scattered, and the widest, shards included."""

    gathered: torch.dtype
    scattered: torch.dtype
    widest: torch.dtype


def dtypes_of(group: Any) -> Dtypes:
    """Return the types in which a unit is exchanged."""
    trained = next((own for own in group.fsdp_params if own.sharded_param.requires_grad), group.fsdp_params[0])
    own, policy = trained.sharded_param.dtype, group.mp_policy
    gathered = policy.param_dtype or own
    scattered = policy.reduce_dtype or gathered
    return Dtypes(gathered, scattered, max(own, gathered, scattered, key=lambda dtype: dtype.itemsize))


def gathered_nbytes(group: Any) -> int:
    """Return the bytes of a unit's parameters as they are gathered."""
    parameters = [own.sharded_param for own in group.fsdp_params]  # frozen ones may have other types
    nbytes: int = sum(own.numel() * (group.mp_policy.param_dtype or own.dtype).itemsize for own in parameters)
    return nbytes


def scattered_nbytes(group: Any) -> int:
    """Return the bytes of a unit's gradients as they are scattered."""
    trained: list[int] = [own.sharded_param.numel() for own in group.fsdp_params if own.sharded_param.requires_grad]
    return dtypes_of(group).scattered.itemsize * sum(trained)


class Hearer(Protocol):
    """Follows calls of ``fully_shard``, and the forwards of models that they have sharded."""

    def arguments(self, unit: Any, named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that a call gets instead of the script's."""
        ...

    def around(self, model: ShardedModel, inputs: tuple[Any, ...], named: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return the context in which a model's forward runs."""
        ...


class _Forwards:
    """Hooks units. A unit whose forward runs first is a model; units inside it then lose their hooks."""

    def __init__(self, hearer: Hearer) -> None:
        self._hearer, self._owner = hearer, os.getpid()
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._models: dict[int, ShardedModel] = {}
        self._open: list[tuple[nn.Module, AbstractContextManager[Any]]] = []

    def hook(self, unit: nn.Module) -> None:
        """Hook the forwards of a unit."""
        eager: Any = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001  # as torch's own hooks
        begins, ends = (eager(functools.partial(each)) for each in (self._begins, self._ends))
        self._handles[id(unit)] = [
            unit.register_forward_pre_hook(begins, prepend=True, with_kwargs=True),
            unit.register_forward_hook(ends, always_call=True),
        ]

    def _begins(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._open or os.getpid() != self._owner:  # a forward within another's, or in a fork, such as a loader's
            return
        if id(module) not in self._models:
            self._models[id(module)] = model = ShardedModel(module)
            for inner in [*model.units.values()][1:]:
                for handle in self._handles.pop(id(inner), ()):
                    handle.remove()
        context = self._hearer.around(self._models[id(module)], inputs, named)
        context.__enter__()
        self._open.append((module, context))

    def _ends(self, module: nn.Module, *_: object) -> None:
        if self._open and self._open[-1][0] is module:
            self._open.pop()[1].__exit__(None, None, None)


def _replace(module: ModuleType, hearer: Hearer) -> None:
    own, forwards = module.fully_shard, _Forwards(hearer)

    @functools.wraps(own)
    def fully_shard(module: Any, **named: Any) -> Any:
        result = own(module, **hearer.arguments(module, named))
        for unit in module if isinstance(module, (list, tuple)) else [module]:
            forwards.hook(unit)
        return result

    module.fully_shard = fully_shard  # type: ignore[attr-defined]  # it has one


def refuse_mixed(models: Iterable[nn.Module]) -> None:
    """Raise ``ConfigError`` if some models are DistributedDataParallel, and some have units of ``fully_shard``."""
    known = list(models)
    if any(isinstance(each, DistributedDataParallel) for each in known) and any(is_unit(part) for each in known for part in each.modules()):
        raise mixed()


def mixed() -> ConfigError:
    """Return the error of a process that trains a sharded model and a DistributedDataParallel."""
    hint = "use one of the two for all models that train: fully_shard with a mesh of replicas (HSDP) does what both would"
    return ConfigError(
        "trains beside models of DistributedDataParallel, and steps of both are not told apart",
        WHERE,
        hint=hint,
    )


def follow(module: ModuleType, hearer: Hearer) -> None:
    """Make ``hearer`` follow calls of ``fully_shard`` in ``module``, which has just been imported; refuse FSDP1."""
    if module.__name__.endswith("fully_sharded_data_parallel"):
        module.FullyShardedDataParallel.__init__ = _refuse_first
    else:
        _replace(module, hearer)


def _refuse_first(*_: Any, **__: Any) -> NoReturn:
    if dist.is_initialized() and TUNING in os.environ:
        watch_driver(dist.get_rank())  # reports the error to the driver
    hint = "shard by fully_shard (FSDP2): Trainer and Accelerate do with fsdp_version=2, Lightning with ModelParallelStrategy"
    raise ConfigError("is FSDP1, which is not supported", "FullyShardedDataParallel", hint=hint)
