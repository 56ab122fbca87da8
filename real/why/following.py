"""Following: leads forwards of DistributedDataParallel and ``fully_shard`` models through a process's observer."""

import functools
import itertools
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame  # by which dynamo sets its compiler

from real.job.driver_watch import end_script
from real.processes.attached import NEVER_CALLED, note_unattached

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from real.fully_shard import ShardedModel
    from real.why.fleet_model import FleetModel
    from real.why.observer import Observer


_MOST_STEPS, _LONGEST_S = 50, 20.0
"""Number of optimizer steps, and seconds, without DDP and ``fully_shard``, after both of which a process gives up."""


@functools.cache
def _observers() -> list["Observer"]:
    """Return the list that holds this process's observer, once it exists."""
    return []


def observer_of(model: "nn.Module", living: "FleetModel | ShardedModel | None" = None) -> "Observer | None":
    """Return the process's observer, created at a model's first forward with gradients; ``None`` before.

    ``living`` adapts the model to the observer. Without it, the model is a DDP.
    """
    if not _observers() and torch.is_grad_enabled():
        from real.why.observer import Observer
        from real.why.settings import LivingDdp

        _observers().append(Observer(model, living or LivingDdp(model)))
    return _observers()[0] if _observers() else None


def follow(module: ModuleType) -> None:
    """Observe this process through ``module``, one of torch's modules that has just been imported."""
    if module.__name__ == "torch.nn.parallel.distributed":
        _follow_ddp(module)
    elif "fsdp" in module.__name__:
        from real import fully_shard

        fully_shard.follow(module, _Looking())
    else:
        _follow_steps(module)


class _Looking:
    """Observes models of ``fully_shard``, without changing the calls."""

    def arguments(self, _unit: Any, named: dict[str, Any]) -> dict[str, Any]:
        """Return the script's arguments unchanged."""
        return named

    def around(self, model: "ShardedModel", inputs: tuple[Any, ...], named: dict[str, Any]) -> "AbstractContextManager[None]":
        """Return the context in which the observer records a forward."""
        observer = observer_of(model.module, model)
        return nullcontext() if observer is None else observer.forward(model.module, inputs, named)


def _follow_steps(module: ModuleType) -> None:
    """End a process that trains without DDP and ``fully_shard``."""
    num, begin_s, owner = itertools.count(1), time.monotonic(), os.getpid()

    def stepped(*_: object) -> None:
        if not _observers() and next(num) >= _MOST_STEPS and time.monotonic() - begin_s > _LONGEST_S and os.getpid() == owner:
            note_unattached(NEVER_CALLED)
            end_script()

    module.register_optimizer_step_post_hook(stepped)


def _follow_ddp(module: ModuleType) -> None:
    ddp = module.DistributedDataParallel
    forward, owner = ddp.forward, os.getpid()

    def observed(model: Any, *inputs: Any, **named: Any) -> Any:
        compiles = set_eval_frame(None)  # what stands around the forward is no part of a compiled graph

        def call() -> Any:
            set_eval_frame(compiles)
            try:
                return forward(model, *inputs, **named)
            finally:
                set_eval_frame(None)

        try:
            observer = observer_of(model) if os.getpid() == owner else None  # no fork, such as a loader's
            with nullcontext() if observer is None else observer.forward(model, inputs, named):
                return call()
        finally:
            set_eval_frame(compiles)

    ddp.forward = _eager(observed)


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from compilation, as torch's own forward is; what it calls may be compiled."""
    eager: Callable[..., Any] = torch._disable_dynamo(function, recursive=False)  # type: ignore[attr-defined]  # noqa: SLF001  # as torch
    return eager
