"""A change of strategy in the living process of a user's script.

The engine in force takes its hooks and buffers away; the optimizer's state becomes rank 0's, because Local SGD and layer profiles leave
another one on every rank; a new engine starts all ranks from rank 0's parameters and buffers. The user's ``.grad`` stay what they were,
so that what reads them after ``optimizer.step()`` reads on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators, agree_on
from real.compute.recompute import SavedForBackward
from real.engine.engine import Engine
from real.layer_times import ProfileLeg
from real.leg import Leg
from real.leg_steps import Beat, Trained, keeping_gradients


class EngineSwitch(Trained):
    """One rank's script. Every rank changes its engine at the same step. ``on_engine`` hears of every engine that takes over."""

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, on_engine: Callable[[Engine], None], trainers_per_node: int
    ) -> None:
        super().__init__(engine.communicators, engine.strategy, trainers_per_node)
        self._engine: Engine | None = engine
        self.model, self.optimizer = engine.model, optimizer
        self._on_engine = on_engine
        self._evaluated: set[int] = set()
        self._watching: RemovableHandle | None = None

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

    def use(self, engine: Engine) -> None:
        """See ``Trained``."""
        engine.stopwatch.fetch_every = sys.maxsize  # no rank waits for the device to hear a loss
        self._on_engine(engine)

    def begin(self, leg: Leg, beat: Beat) -> Engine:
        """Change to the leg's strategy, or the script's own, and look at the model's forwards from now on."""
        strategy = self.own_strategy if leg.start == "as_is" else leg.strategy
        engine = self.open(strategy, first_step=1 - leg.warmup_steps, record=leg.record)
        engine.on_step = beat

        def see_forward(model: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
            if not model.training:  # such a forward follows the step before it, whose end it delays
                self._evaluated.add(engine.step)
            elif model.training and self.batch_size is None:
                leaves = pytree.tree_leaves((arguments, named))
                self.batch_size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)

        self._watching = self.model.register_forward_pre_hook(see_forward, with_kwargs=True)
        return engine

    def results(self, _leg: Leg) -> dict[str, Any]:
        """The steps after which the script has evaluated its model."""
        assert self._watching is not None
        self._watching.remove()
        evaluated, self._evaluated = sorted(self._evaluated), set()
        return {"evaluated": evaluated}

    def measuring(self, _leg: Leg) -> ProfileLeg:
        """See ``Trained``."""
        self.leave()
        return ProfileLeg(self.model, self.optimizer, self.communicators)

    def count_saved(self, saved: SavedForBackward) -> None:
        """See ``Trained``; the loss is the script's."""
        handles: list[RemovableHandle] = []

        def enter(*_: object) -> None:
            if self.model.training and torch.is_grad_enabled():
                saved.__enter__()
                handles.append(self.model.register_forward_hook(leave))

        def leave(*_: object) -> None:
            saved.__exit__(None, None, None)
            while handles:
                handles.pop().remove()

        handles.append(self.model.register_forward_pre_hook(enter))

    def leave(self) -> None:
        """Close the engine in force, and let all ranks hold one state of the optimizer."""
        if self._engine is not None:
            with keeping_gradients(self.model):
                self._engine.close()
            self._engine = None
        share_state(self.optimizer, self.communicators)


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
