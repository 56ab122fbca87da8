"""Attaching: what a script with fleet's four lines calls, called for a script without them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from fleetbench.errors import ConfigError
from fleetbench.fleet_names import FieldHasNoEffect
from fleetbench.strategy import DistributedStrategy
from real.attach.settings import combined, not_expressed, own_strategy, refuse_settings
from real.collective import Collective
from real.compute.living import living_hook
from real.fleet import fleet
from real.processes.roles import STRATEGY, TUNING

if TYPE_CHECKING:
    from real.attach.ddp import DistributedDataParallel

_TIMEOUT_S = 120.0
"""Least timeout of a collective; the script's process group may allow more."""


class Attached:
    """The process's part in the job. ``before_forward`` of each model makes it the job's, with the optimizers that hold its parameters."""

    def __init__(self) -> None:
        self._job: Collective | None = None
        self._has_said = False
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def before_forward(self, model: DistributedDataParallel, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """A forward with gradients is about to run; ``optimizers``: those that hold the model's parameters, if there are new ones."""
        if not model.is_attached:
            self._attach(model)
        assert self._job is not None
        for optimizer in optimizers:
            if optimizer not in self._optimizers:
                fleet.distributed_optimizer(optimizer)
                self._optimizers.add(optimizer)
        if (engine := self._job.models.of(model)) is None:
            what, hint = "has been wrapped again since, and the new wrapper exchanges its gradients", "call the new wrapper in the loop"
            raise ConfigError(what, "the model inside this DistributedDataParallel", hint=hint)
        engine.expect(synced=model.require_backward_grad_sync)

    def follows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's steps are updates of the job's."""
        return optimizer in self._optimizers

    def stepped(self) -> None:
        """A step has ended that had begun before its optimizer was known."""
        if self._job is not None and self._job.driven is not None:
            self._job.driven.step_done()

    def hear_backward(self, model: DistributedDataParallel) -> None:
        """A backward may come within the forward under way."""
        assert self._job is not None
        if (engine := self._job.models.of(model)) is not None:
            engine.hear_backward()

    def join(self, model: DistributedDataParallel, *arguments: Any, **named: Any) -> AbstractContextManager[None]:
        """See torch's ``join``."""
        assert self._job is not None
        engine = self._job.models.of(model)
        if engine is not None and engine.plan.buffers_nbytes:
            what = "is not followed for a model with buffers that rank 0 sends, such as statistics of batch norm"
            hint = "set broadcast_buffers=False, or give every trainer as many batches"
            raise ConfigError(what, "DistributedDataParallel.join", hint=hint)
        names = ("divide_by_initial_world_size", "enable", "throw_on_early_termination")
        return self._job.models.join(self._job.communicators, model, **dict(zip(names, arguments, strict=False)), **named)

    def _read(self, *_: object) -> None:
        """A ``state_dict`` is read: say once if it is this rank's alone."""
        if self._job is None or self._job.driven is not None or self._has_said or self._job.models.have_agreed:
            return
        self._has_said = True
        what = "a state_dict is read in the middle of a round of local steps: parameters are those of this rank alone"
        hint = "call fleet.synchronize() on every rank before the model is saved or evaluated (from fleetbench import fleet)"
        print(f"fleet: rank {self._job.worker_index()}: {what}\nHINT: {hint}", file=sys.stderr, flush=True)  # noqa: T201  # as at the script's end

    def _attach(self, model: DistributedDataParallel) -> None:
        own, is_driven = own_strategy(model), TUNING in os.environ
        strategy = own if is_driven else combined(DistributedStrategy.load(Path(os.environ[STRATEGY])), own)
        if self._job is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if is_driven else "default", FieldHasNoEffect)
                fleet.init(strategy, timeout_s=timeout_s())
            assert isinstance(fleet.job, Collective)
            self._job = fleet.job
        refuse_settings(model)
        self._job.notes = tuple(not_expressed(model))
        for engine in () if is_driven else list(self._job.models):
            if getattr(engine.model, "module", None) is model.module:  # such as for a second `fit` of Lightning's
                engine.retire("DistributedDataParallel")
                self._job.models.forget(engine)
        model.switch_off()
        model.module.register_state_dict_pre_hook(living_hook(self._read))
        buffers = [] if model.broadcast_buffers else [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._job.distributed_model(model, strategy)
        with torch.no_grad():
            for buffer, before in buffers:  # each rank's own, also at the beginning
                buffer.copy_(before)


def timeout_s() -> float:
    """What the script's process group allows a collective: a rank may evaluate alone while the others wait for it."""
    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001  # torch has no public name for it
    found = (getattr(backend.options, "_timeout", None) for backend in map(group._get_backend, group._device_types))  # noqa: SLF001  # as above
    return max(_TIMEOUT_S, *(each.total_seconds() for each in found if isinstance(each, timedelta)))
