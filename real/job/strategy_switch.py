"""A change of strategy in the living process of a user's script.

The engine in force takes its hooks and buffers away; the optimizer's state becomes rank 0's, because Local SGD and layer profiles leave
another one on every rank; a new engine starts all ranks from rank 0's parameters and buffers. The user's ``.grad`` stay what they were,
so that what reads them after ``optimizer.step()`` reads on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators, agree_on
from real.engine.engine import Engine


class EngineSwitch:
    """One rank's. Every rank changes its engine at the same step. ``use`` hears of every engine that takes over."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, use: Callable[[Engine], None], trainers_per_node: int) -> None:
        self._engine: Engine | None = engine
        self.model: nn.Module = engine.model
        self.optimizer = optimizer
        self.communicators: Communicators = engine.communicators
        self.own_strategy = engine.strategy
        """What the script itself has asked for."""
        self.trainers_per_node = trainers_per_node
        self.use = use

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.communicators.device

    def open(self, strategy: DistributedStrategy, *, first_step: int = 1, record: bool = False, keep_times: bool = True) -> Engine:
        """Change to ``strategy``; the next step is ``first_step``."""
        self.leave()
        engine = Engine(
            self.model,
            strategy,
            self.communicators,
            first_step=first_step,
            record=record,
            keep_times=keep_times,
            trainers_per_node=self.trainers_per_node,
        )
        engine.attach_optimizer(self.optimizer)
        self._engine = engine
        self.use(engine)
        return engine

    def leave(self) -> None:
        """Close the engine in force, and let all ranks hold one state of the optimizer."""
        if self._engine is not None:
            with keeping_gradients(self.model):
                self._engine.close()
            self._engine = None
        share_state(self.optimizer, self.communicators)


@contextmanager
def keeping_gradients(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, ``.grad`` are what they were."""
    gradients = [parameter.grad for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient


@torch.no_grad()
def share_state(optimizer: torch.optim.Optimizer, communicators: Communicators) -> None:
    """Let every rank's optimizer have rank 0's state, tensor by tensor, in place.

    Numbers that are no tensors on the trainers' device, such as counts of steps, are the same on all
    ranks anyway. Raises ``ConfigError`` on a rank that holds other state than rank 0.
    """
    if communicators.trainers == 1:
        return
    found = list(_state(optimizer))
    shapes = json.dumps([[where, list(tensor.shape), str(tensor.dtype)] for where, tensor in found])
    agree_on(hashlib.sha256(shapes.encode()).hexdigest(), "holds other optimizer state than rank 0", communicators)
    for _, tensor in found:
        if tensor.device.type == communicators.device.type:
            communicators.broadcast(tensor)


def _state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of an optimizer's state with its place, in one order on all ranks."""
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            for name in sorted(state):
                if isinstance(state[name], torch.Tensor):
                    yield f"{number}.{index}.{name}", state[name]
