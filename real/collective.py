"""Collective: the implementation of ``fleet`` in a job without parameter servers.

``recommended`` loads the strategy for ``strategy.auto``.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.experiment import HierarchySwitchedOff
from fleetbench.overview import overview
from fleetbench.plan.combination import Combination
from fleetbench.plan.training import PLANNED
from fleetbench.recommended import folder_of, key_of, text_of
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import refuse_unexecuted
from real.checkpoints.meeting import Meeting
from real.communication.communicators import (
    Communicators,
    Errors,
    backend_of_world,
    collective_errors,
    device_of,
    nccl_device,
    texts_of_store,
)
from real.compute.living import NotCopied
from real.engine.engine import Engine
from real.engine.fleet_engine import FleetEngine
from real.engine.refusals import refuse_model, refuse_nonlinear, refuse_untrainable
from real.models import MODEL, Models
from real.processes.exits import at_exit, keep_in_forks
from real.processes.failures import Failures
from real.processes.joining import join, renew_store
from real.processes.roles import JOINED, TUNING, WHY, Role, launcher_of, role_among, role_of

if TYPE_CHECKING:
    from real.checkpoints.saving import Loaded
    from real.job.rank_legs import RankLegs


class Collective:
    """A trainer's part in a job without parameter servers.

    Life cycle: created, when all trainers have joined -> ``distributed_model`` -> ``distributed_optimizer``
    -> training -> ``leave``. Raises ``ConfigError`` for calls out of order, or a strategy that cannot be
    executed.
    """

    is_server = False
    engine_kind = FleetEngine

    def __init__(
        self,
        strategy: DistributedStrategy,
        timeout_s: float,
        *,
        startup_timeout_s: float | None = None,
        backend: str | None = None,
        device: str | None = None,
    ) -> None:
        """Join the other trainers within ``startup_timeout_s``, by default the ``timeout_s`` of every collective.

        Backend and device are by default what the host has. With gloo, the device becomes the model's.
        """
        if strategy.auto:
            refuse_beside_auto(strategy)
        else:
            refuse_unexecuted(strategy, "strategy", PLANNED, "the real executor")
        self.role = self.own_role()
        self.models = Models()
        self._strategy = strategy
        self._is_auto = strategy.auto
        self._failures: Failures | None = None
        self.driven: RankLegs | None = None
        """Legs of this rank, if a driver orders them; otherwise ``None``."""
        self.notes: tuple[str, ...] = ()
        """Notes about the script for a driver, in addition to the strategy."""
        self._meeting: Meeting | None = None
        arrive(self.role.rank)
        timeout = timedelta(seconds=timeout_s)
        has_group = dist.is_initialized()
        if has_group:
            renew_store(timeout)
        else:
            join(self.role, timedelta(seconds=startup_timeout_s or timeout_s), backend)
            at_exit(_part)
        self._backend = backend_of_world()
        if (self.role.rank, self.role.trainers) != (dist.get_rank(), dist.get_world_size()):
            self.role = role_among(texts_of_store("host", socket.gethostname()), dist.get_rank())
        if self._backend == "nccl":
            found = nccl_device(self.role.local_rank, is_set=has_group)
        else:
            found = device_of(device or "cpu", self.role.local_rank)
        at_exit(self.leave)
        keep_in_forks(self, dist.distributed_c10d._world.pg_map)  # noqa: SLF001  # torch has no other name
        self.communicators = Communicators(self._backend, timeout, found, errors=self._watch_failures())
        self.communicators.barrier()
        self.meeting = self._meeting = Meeting(timeout, self._failures)
        self.endpoints = self.role.endpoints or tuple(self.meeting.texts(f"{socket.gethostname()}:{self.role.local_rank}"))
        if os.environ.get(TUNING) and WHY not in os.environ:
            from real.job.rank_legs import RankLegs

            self.driven = RankLegs.join(self.meeting)

    @property
    def trainers(self) -> int:
        """Number of trainers."""
        return self.communicators.trainers

    def own_role(self) -> Role:
        """Return this process's role."""
        return role_of(os.environ)

    def environment(self) -> dict[str, object]:
        """Return facts about the job, which are printed with its strategy."""
        role = self.role
        return {
            "trainers": self.trainers,
            **({} if role.trainers_per_node is None else {"trainers per node": role.trainers_per_node}),
            "launcher": launcher_of(role, os.environ),
            "rendezvous": role.rendezvous or role.store or "none",
            "backend": self._backend,
        }

    def distributed_model(self, model: torch.nn.Module, strategy: DistributedStrategy | None = None) -> torch.nn.Module:
        """Start all trainers from rank 0's parameters and buffers, and hook the model; return the same model.

        A model that was hooked before is hooked again as it is now. ``strategy`` replaces the job's if this
        model has other settings for unused parameters or buffers.
        """
        refuse_untrainable(model)
        if self.driven is None:
            self.models.sweep(self.meeting, collects=True)
        self.models.refuse_another(model, is_auto=self._is_auto, is_driven=self.driven is not None)
        before = self.models.of(model)
        optimizers = () if before is None else tuple(before.optimizers)
        self._follow(next(model.parameters()).device)
        if isinstance(before, FleetEngine):
            refuse_model(model, self.communicators.device)
            before.retire(MODEL)
        if self._strategy.auto:
            self._strategy = self.recommended(model)
        if self.role.trainers_per_node is None and self._strategy.use_hierarchical_allreduce:
            hint = "start as many trainers on every node, and a node's in one row (srun --ntasks-per-node=N --distribution=block)"
            what = "nodes differ in their number of trainers, or ranks are not numbered node by node"
            raise ConfigError(what, "strategy.use_hierarchical_allreduce", "true", hint)
        nodes = self.role.trainers_per_node or 1
        shared = (strategy or self._strategy, self.communicators)
        engine = self.engine_kind(model, *shared, keep_times=False, trainers_per_node=nodes, company=self.models)
        self.use(engine)
        engine.inherit(optimizers)
        if WHY in os.environ:
            from real.why.fleet_model import FleetModel

            FleetModel(engine)
        if self._strategy.use_hierarchical_allreduce and "inner" not in engine.plan.parts:
            message = "one node, or one group of hierarchical_inner_ranks, has no hierarchy: use_hierarchical_allreduce is switched off"
            warnings.warn(message, HierarchySwitchedOff, stacklevel=3)
        add_ddp_attributes(model, join=partial(self.models.join, self.communicators, model), no_sync=partial(self.models.no_sync, model))
        return model

    def _follow(self, place: torch.device) -> None:
        """Move the exchange to the model's device, if the backend is gloo.

        Raises ``ConfigError`` if trainers have the model on different kinds of device.
        """
        if self._backend != "gloo" or not torch.cuda.is_available():
            return
        kinds = self.meeting.texts(place.type)
        if len(set(kinds)) > 1:
            hint = "move it to one kind of device on all trainers before fleet.distributed_model"
            raise ConfigError("is on another kind of device than other trainers'", "the model", ", ".join(kinds), hint)
        if place.type == "cuda" and place != self.communicators.device:
            self.communicators.move(place)

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the optimizer's steps be the strategy's updates; it replaces earlier optimizers of its parameters."""
        engines = self.models.holding(optimizer, "fleet.distributed_optimizer")
        if engines[0].optimizers and self.driven is not None:
            what = "a script that gives fleet several optimizers, or a new one later, is neither profiled nor tuned"
            hint = "put all parameters into the groups of one optimizer, later ones by optimizer.add_param_group(...)"
            raise ConfigError(what, "fleet.distributed_optimizer", type(optimizer).__name__, hint)
        refuse_nonlinear(self._strategy, optimizer)
        for engine in engines:
            engine.attach_optimizer(optimizer)
        if self.driven is not None:
            from real.job.rank_legs import EngineSwitch

            self.driven.begin(EngineSwitch(engines[0], optimizer, self.use, self.role.trainers_per_node or 1, self.notes))
        return optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards inside add to ``.grad`` only on this trainer."""
        return self.models.no_sync()

    def join(self, *, enable: bool, throw_on_early_termination: bool) -> AbstractContextManager[None]:
        """Let trainers have different numbers of batches inside; see ``Fleet.join``."""
        self.models.sweep(self.meeting)
        return self.models.join(self.communicators, enable=enable, throw_on_early_termination=throw_on_early_termination)

    def synchronize(self) -> None:
        """Make the trainers agree; see ``Fleet.synchronize``."""
        engines = self._met("fleet.synchronize")
        if not self.models.have_agreed:  # otherwise this averaging could match a later one of a trainer that does not call it
            self.meeting.meet("fleet.synchronize")
        for engine in engines:
            engine.flush()

    pull_model = synchronize

    def report(self, loss: torch.Tensor | float, metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Report the step's loss, and metrics that a tuning may use."""
        engines = self.models.all("fleet.report")
        if self.driven is None or not self.driven.report(loss, metrics):
            for engine in engines:
                engine.report(loss)

    def _met(self, where: str) -> list[Engine]:
        """Return all engines; if they may exchange something now, those whose model still exists on all trainers."""
        what = Combination.of(self._strategy)
        if what.is_local or what.merges:
            self.models.sweep(self.meeting)
        return self.models.all(where)

    def end_epoch(self) -> None:
        """End an epoch of the data on every engine."""
        for engine in self._met("fleet.end_epoch"):
            engine.end_epoch()

    def worker_index(self) -> int:
        """Return this trainer's rank."""
        return self.communicators.rank

    def server_index(self) -> NoReturn:
        """Raise ``ConfigError``: a trainer is no server."""
        raise ConfigError(
            "this process is no server", "fleet.server_index", f"trainer {self.worker_index()}", "ask fleet.is_server() first"
        )

    def barrier(self) -> None:
        """Wait for all trainers."""
        self.communicators.barrier()

    def save(self, path: Path, *, extra: object) -> None:
        """Save everything that training needs to resume into ``path``; do nothing in a tuning."""
        if os.environ.get(TUNING):  # a tuning's training must not replace a real one's save
            return
        from real.checkpoints.saving import save  # imported late, because not every training saves

        save(self.models.kept("fleet.save_persistables", self.meeting), self.meeting, path, extra=extra)

    def load(self, path: Path, *, predicate: Callable[[str], bool] | None, model: nn.Module | None = None, resynchronize: bool) -> Loaded:
        """Resume from a save; see ``Fleet.load_persistables``."""
        from real.checkpoints.saving import LOAD, load, load_some

        if predicate is not None:
            number, engine = self.models.chosen(model, LOAD, self.meeting)
            return load_some(engine, self.meeting, path, predicate, model=number)
        if model is not None:
            hint = "add predicate=lambda name: True, or leave model out to resume all models"
            raise ConfigError("chooses a model for predicate=...", f"{LOAD}(model=...)", type(model).__name__, hint)
        resynchronize = resynchronize or self.driven is not None  # a leg's strategy may differ from the saved one
        return load(self.models.kept(LOAD, self.meeting), self.meeting, path, resynchronize=resynchronize)

    def save_inference_model(
        self, path: Path, example_inputs: Sequence[object], dynamic_shapes: object, model: nn.Module | None = None
    ) -> None:
        """Export the model on rank 0; do nothing in a tuning."""
        if os.environ.get(TUNING):
            return
        from real.checkpoints.inference import EXPORT, save_inference_model

        _, engine = self.models.chosen(model, EXPORT, self.meeting)
        save_inference_model(engine, self.meeting, path, example_inputs, dynamic_shapes)

    def leave(self) -> None:
        """At exit, wait for the other trainers, unless this process or another one has failed; then close the groups.

        The script may have destroyed its process group before. If a collective broke, or a rank has failed,
        the exit code is never 0.
        """
        if self._meeting is not None and self._failures is not None and not self._has_failed:
            self._failures.begin_exit()
            with suppress(RuntimeError):  # the failures name the rank that is gone
                self._meeting.leave()
            if not self._has_failed and self.driven is None:
                self._say_open_round()
        if self._failures is not None:
            if self._failures.has_failed:
                self._failures.leave()
            self._failures.end()
        if self._meeting is not None and not self._has_failed:
            self.communicators.close()

    def _say_open_round(self) -> None:
        """At exit, warn if the script's last local steps were not averaged.

        Fleet cannot know what the script has saved by ``torch.save``.
        """
        if self.meeting.rank == 0 and not self.models.have_agreed:
            what = "the script ends in the middle of a round of local steps: ranks' models differ, and so do files not saved by fleet"
            hint = "call fleet.synchronize() on every rank after the last step, before the model is saved or evaluated"
            print(f"fleet: {what}\nHINT: {hint}", file=sys.stderr)  # noqa: T201  # as fleet.init prints its box

    @property
    def _has_failed(self) -> bool:
        return hasattr(sys, "last_value") if self._failures is None else self._failures.has_failed

    def _watch_failures(self) -> Errors:
        """Start to watch for failures of any rank; return the context manager for every collective."""
        if dist.get_world_size() == 1:
            return collective_errors
        self._failures = Failures(
            dist.distributed_c10d._get_default_store(),  # noqa: SLF001  # torch has no other name for it
            dist.get_rank(),
            dist.get_world_size(),
            step=self.num_steps,
        )
        self._failures.start()
        return self._failures.broken

    def num_steps(self) -> int:
        """Return the current step of this rank; 0 before the first."""
        return max((engine.step for engine in self.models.engines), default=0)

    def use(self, engine: Engine) -> None:
        """Let this engine run its model from now on."""
        self.models.put(engine)
        engine.meeting = self.meeting
        if self._failures is not None:
            engine.on_failure = self._failures.announce

    def recommended(self, model: torch.nn.Module) -> DistributedStrategy:
        """Return the strategy that is stored for this model on these trainers; in a tuning, Fleet's defaults."""
        if self.driven is not None:
            return DistributedStrategy()
        strategy = recommended(model, self.meeting, self.communicators.device, self.role.trainers_per_node or 1)
        refuse_unexecuted(strategy, "strategy", PLANNED, "the real executor")
        if self.worker_index() == 0:
            print(overview(strategy), file=sys.stderr)  # noqa: T201  # as fleet.init prints the script's own
        return strategy


def add_ddp_attributes(model: nn.Module, *, join: Callable[..., Any], no_sync: Callable[..., Any]) -> None:
    """Give a model the attributes of DistributedDataParallel that scripts use, unless it has such names itself."""
    if not hasattr(model, "module"):
        model.__dict__["module"] = model  # setattr would make it a submodule
    for name, call in (("join", join), ("no_sync", no_sync)):
        if not hasattr(model, name):
            setattr(model, name, NotCopied(call, nullcontext))


def _part() -> None:
    """At exit, destroy the process group that ``fleet.init`` created."""
    if dist.is_initialized():
        dist.destroy_process_group()


def arrive(rank: int) -> None:
    """Let ``fleetbench launch`` know that this trainer has called ``fleet.init``.

    In a tuning, this process also begins to watch its driver, and ends with it.
    """
    if os.environ.get(TUNING):
        from real.job.driver_watch import watch_driver

        watch_driver(rank)
    if JOINED in os.environ:
        with suppress(OSError):  # only a remark of the launcher depends on it
            Path(os.environ[JOINED]).touch()


def refuse_beside_auto(strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError`` for a strategy that asks for a recommendation and sets other fields."""
    others = [name for name in strategy.changes() if name != "auto"]
    if others:
        hint = "leave them out, or load the recommendation and change it: DistributedStrategy.load(FILE).replace(...)"
        raise ConfigError("is what chooses these fields", "strategy.auto", ", ".join(others), hint)


def model_key(model: nn.Module, *, trainers: int, trainers_per_node: int, device: torch.device) -> str:
    """Return the key under which a recommendation for this model on these trainers is stored."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = [(name, parameter.numel(), str(parameter.dtype).removeprefix("torch.")) for name, parameter in trained]
    return key_of(gradients, trainers=trainers, trainers_per_node=trainers_per_node, device=device.type)


def recommended(model: nn.Module, meeting: Meeting, device: torch.device, trainers_per_node: int) -> DistributedStrategy:
    """Return the stored strategy that rank 0 finds; every trainer calls it.

    Raises ``ConfigError`` on all trainers if there is none.
    """
    folder = folder_of()
    key = model_key(model, trainers=meeting.trainers, trainers_per_node=trainers_per_node, device=device)
    text = ""
    with meeting.together("strategy.auto"):
        if meeting.rank == 0:
            text = text_of(folder, key)
    return DistributedStrategy.parse(meeting.texts(text)[0], str(folder / f"{key}.toml"))
