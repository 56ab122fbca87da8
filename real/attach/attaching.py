"""Attaching: makes the calls of fleet's four lines for a script that does not contain them."""

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
"""Shortest timeout of a collective in seconds; the script's process group may allow more."""


class Attached:
    """This process's part in the job.

    ``before_forward`` hands each model to the job, with the optimizers that hold its parameters.
    """

    def __init__(self) -> None:
        self._job: Collective | None = None
        self._has_said = False
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def before_forward(self, model: DistributedDataParallel, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Attach the model at its first forward with gradients, and new optimizers that hold its parameters.

        Raises ``ConfigError`` for a model that was wrapped again.
        """
        if not model.is_attached:
            self._attach(model)
        assert self._job is not None
        for optimizer in optimizers:
            if optimizer not in self._optimizers:
                fleet.distributed_optimizer(optimizer)
                self._optimizers.add(optimizer)
        if (engine := self._job.models.of(model)) is None:
            what, hint = "has been wrapped again, and the new wrapper exchanges its gradients", "call the new wrapper in the loop"
            raise ConfigError(what, "the model inside this DistributedDataParallel", hint=hint)
        engine.expect(synced=model.require_backward_grad_sync)

    def follows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's steps are updates of the job."""
        return optimizer in self._optimizers

    def stepped(self) -> None:
        """Count a step during which the job began to follow the optimizer."""
        if self._job is not None and self._job.driven is not None:
            self._job.driven.step_done()

    def hear_backward(self, model: DistributedDataParallel) -> None:
        """Expect a backward inside the current forward."""
        assert self._job is not None
        if (engine := self._job.models.of(model)) is not None:
            engine.hear_backward()

    def join(self, model: DistributedDataParallel, *arguments: Any, **named: Any) -> AbstractContextManager[None]:
        """Return the context of torch's ``join``, carried out by the job's engine."""
        assert self._job is not None
        engine = self._job.models.of(model)
        if engine is not None and engine.plan.buffers_nbytes:
            what = "is not supported for a model with buffers that rank 0 broadcasts, such as statistics of batch norm"
            hint = "set broadcast_buffers=False, or give all trainers the same number of batches"
            raise ConfigError(what, "DistributedDataParallel.join", hint=hint)
        names = ("divide_by_initial_world_size", "enable", "throw_on_early_termination")
        return self._job.models.join(self._job.communicators, model, **dict(zip(names, arguments, strict=False)), **named)

    def _read(self, *_: object) -> None:
        """Warn once if a ``state_dict`` is read that belongs only to this rank."""
        if self._job is None or self._job.driven is not None or self._has_said or self._job.models.have_agreed:
            return
        self._has_said = True
        what = "a state_dict is read in the middle of a round of local steps: it has only this rank's parameters"
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
            # for example in a second `fit` of Lightning
            if getattr(engine.model, "module", None) is model.module:
                engine.retire("DistributedDataParallel")
                self._job.models.forget(engine)
        model.switch_off()
        model.module.register_state_dict_pre_hook(living_hook(self._read))
        buffers = [] if model.broadcast_buffers else [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._job.distributed_model(model, strategy)
        with torch.no_grad():
            for buffer, before in buffers:  # each rank keeps its own, also at the start
                buffer.copy_(before)


def timeout_s() -> float:
    """Return the seconds that the script's process group allows for a collective, at least ``_TIMEOUT_S``.

    A rank may evaluate while the others wait for it.
    """
    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001  # torch has no public name for it
    found = (getattr(backend.options, "_timeout", None) for backend in map(group._get_backend, group._device_types))  # noqa: SLF001  # as above
    return max(_TIMEOUT_S, *(each.total_seconds() for each in found if isinstance(each, timedelta)))
