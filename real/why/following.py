"""Following: DistributedDataParallel's forward in a process of a job that is looked at."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame  # by which dynamo sets its compiler

if TYPE_CHECKING:
    from real.why.observer import Observer


def follow(module: ModuleType) -> None:
    """Let the first forward with gradients of a DDP make this process's observer; ``module`` has just been imported."""
    ddp = module.DistributedDataParallel
    forward, observers, owner = ddp.forward, list["Observer"](), os.getpid()

    def observed(model: Any, *inputs: Any, **named: Any) -> Any:
        compiles = set_eval_frame(None)  # what stands around the forward is no part of a compiled graph

        def call() -> Any:
            set_eval_frame(compiles)
            try:
                return forward(model, *inputs, **named)
            finally:
                set_eval_frame(None)

        try:
            if not observers and torch.is_grad_enabled() and os.getpid() == owner:  # no fork, such as a loader's
                from real.why.observer import Observer

                observers.append(Observer(model))
            return observers[0].forward(model, call, inputs, named) if observers else call()
        finally:
            set_eval_frame(compiles)

    ddp.forward = _eager(observed)


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Not compiled, as torch's own forward is not; what it calls may be."""
    eager: Callable[..., Any] = torch._disable_dynamo(function, recursive=False)  # type: ignore[attr-defined]  # noqa: SLF001  # as torch
    return eager
