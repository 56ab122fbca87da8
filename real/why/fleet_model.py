"""FleetModel: adapts a model of fleet's four lines to an observer that expects a DDP."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fleetbench.why.change import DdpChange
from fleetbench.why.observed import Model
from real.compute.living import living_hook
from real.engine.engine import Engine
from real.why.following import observer_of

_HOOKS = "_hooks_of_fleetbench_why"


class FleetModel:
    """Hooks a model so that its forwards reach the process's observer. Every rank creates it."""

    can_change = False
    """Whether an observer may change settings: no, they belong to the strategy."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._threads = engine, torch.get_num_threads()
        self.module: nn.Module = engine.model
        self.group: Any = dist.new_group()  # its own, so that the engine's collectives stay in order
        self.device_type = next(self.module.parameters()).device.type
        self._open: list[AbstractContextManager[None]] = []
        for handle in self.module.__dict__.pop(_HOOKS, ()):  # hooks of an earlier engine
            handle.remove()
        self.module.__dict__[_HOOKS] = [
            self.module.register_forward_pre_hook(living_hook(self._begins), prepend=True, with_kwargs=True),
            self.module.register_forward_hook(living_hook(self._ends), always_call=True),
        ]

    def change(self, change: DdpChange) -> None:
        """Set the number of threads; the strategy has all other settings."""
        torch.set_num_threads(change.threads or self._threads)

    def described(self, *, buffers_change: bool) -> Model:
        """Return the model as the observer reports it: bytes, buckets, buffers and type."""
        plan = self._engine.plan
        return Model(
            nbytes=sum(bucket.nbytes for bucket in plan.buckets),
            bucket_nbytes=tuple(bucket.nbytes for bucket in plan.buckets),
            buffers_nbytes=plan.buffers_nbytes,
            buffers_change=buffers_change,
        )

    def _begins(self, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        observer = observer_of(self.module, self)
        self._open.append(nullcontext() if observer is None else observer.forward(self.module, inputs, named))
        self._open[-1].__enter__()

    def _ends(self, *_: object) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)
