"""A leg inside a script: what is measured between two changes of strategy, while the user's own loop runs the steps.

Told of the end of every optimizer step, a leg says when it is done, and then gives its part of the
results. A script that ends in the middle of a leg leaves an incomplete part.

A change of strategy: the engine in force takes its hooks and buffers away; the optimizer's state
becomes rank 0's, because Local SGD and layer profiles leave another one on every rank; a new engine
starts all ranks from rank 0's parameters and buffers. The user's ``.grad`` stay what they were, so that
what reads them after ``optimizer.step()`` reads on.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fleetbench.config import encode
from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators, agree_on
from real.communication.device import backend_of_world
from real.compute.recompute import SavedForBackward
from real.engine.engine import Engine
from real.engine.stopwatch import Stopwatch, encode_steps
from real.job.facts import Facts
from real.layer_times import ProfileLeg
from real.leg import Leg
from real.memory import peak_bytes, reset_peak

Beat = Callable[[int], None]


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


class BatchSize:
    """Looks at what the model is called with, until it has seen a batch in training."""

    def __init__(self, model: nn.Module) -> None:
        self.value: int | None = None
        self._handle: RemovableHandle = model.register_forward_pre_hook(self._sees, with_kwargs=True)

    def _sees(self, model: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        if model.training and tensors:
            self.value = tensors[0].shape[0]
            self._handle.remove()


def facts_of(switch: EngineSwitch, backend: str, batch_size: int | None, *, reports_loss: bool) -> Facts:
    """What this rank knows of the script."""
    group = switch.optimizer.param_groups[0]
    first = next(parameter for parameter in switch.model.parameters() if parameter.requires_grad)
    return Facts(
        trainers=switch.communicators.trainers,
        trainers_per_node=switch.trainers_per_node,
        backend=backend,  # type: ignore[arg-type]  # Facts checks both
        device=switch.device.type,  # type: ignore[arg-type]
        strategy=switch.own_strategy,
        optimizer=type(switch.optimizer).__name__,
        lr=float(group["lr"]),
        momentum=float(group.get("momentum", 0.0)),
        weight_decay=float(group.get("weight_decay", 0.0)),
        dtype=str(first.dtype).removeprefix("torch."),
        batch_size=batch_size,
        reports_loss=reports_loss,
    )


class RunningLeg(ABC):
    """A leg under way, on ``engine``. All ranks call ``step_done`` after the same step and get the same answer."""

    engine: Engine

    def __init__(self, switch: EngineSwitch, leg: Leg) -> None:
        self._switch = switch
        self._leg = leg
        self._num_steps = 0

    @abstractmethod
    def step_done(self) -> bool:
        """A step is over; whether it was the last."""

    @abstractmethod
    def part(self, *, complete: bool) -> dict[str, Any]:
        """This rank's results as plain data; with ``complete``, all ranks ask for them together."""

    def report(self, loss: torch.Tensor | float) -> None:
        """The script tells the step's loss."""
        self.engine.report(loss)
        self.engine.stopwatch.loss(loss)

    def _run_on(self, engine: Engine) -> None:
        self.engine = engine
        engine.stopwatch.fetch_every = self._leg.warmup_steps + self._leg.steps + 1  # no rank waits for the device to hear a loss


class TimedLeg(RunningLeg):
    """Steps under one strategy, each as the stopwatch saw it; under the script's own, also what the script is."""

    def __init__(self, switch: EngineSwitch, leg: Leg, beat: Beat) -> None:
        super().__init__(switch, leg)
        strategy = switch.own_strategy if leg.start == "as_is" else leg.strategy
        self._run_on(switch.open(strategy, first_step=1 - leg.warmup_steps, record=leg.record))
        self.engine.on_step = beat
        self._batch = BatchSize(switch.model) if leg.start == "as_is" else None
        self._reports_loss = False
        self._evaluated: set[int] = set()
        reset_peak(switch.device)
        self._handle = switch.model.register_forward_pre_hook(lambda model, _: self._sees_forward(model.training))

    def report(self, loss: torch.Tensor | float) -> None:
        """See ``RunningLeg``."""
        super().report(loss)
        self._reports_loss = True

    def step_done(self) -> bool:
        """See ``RunningLeg``."""
        self._num_steps += 1
        if self._num_steps == self._leg.warmup_steps:
            reset_peak(self._switch.device)
        return self._num_steps == self._leg.warmup_steps + self._leg.steps

    def part(self, *, complete: bool) -> dict[str, Any]:
        """See ``RunningLeg``. A checkpoint that was loaded counts steps from elsewhere: they are counted from the leg's begin here."""
        self._handle.remove()
        if complete:
            self.engine.flush(end=True)
        self.engine.stopwatch.finish()
        recording = self.engine.recording()
        found: dict[str, list[Any]] = encode_steps(self.engine.stopwatch)
        steps = found["steps"]
        shift = steps[0]["record"]["step"] - (1 - self._leg.warmup_steps) if steps else 0
        for entry in (*(step["record"] for step in steps), *found["spans"]):
            entry["step"] -= shift
        described = {}
        if self._batch is not None:
            described = {"facts": encode(facts_of(self._switch, backend_of_world(), self._batch.value, reports_loss=self._reports_loss))}
        return described | {
            "steps": steps,
            "spans": found["spans"],
            "complete": complete,
            "num_steps": self._num_steps,
            "plan": self.engine.plan.to_dict(),
            "recording": None if recording is None else recording.to_dict(),
            "evaluated": sorted(step - shift for step in self._evaluated),
            "peak_bytes": peak_bytes(self._switch.device),
            "not_finite": not_finite(self.engine.stopwatch, self._switch.model, self._num_steps),
        }

    def _sees_forward(self, training: bool) -> None:
        """A forward in evaluation mode follows the step before it, whose end it delays."""
        if not training and self._num_steps:
            self._evaluated.add(self.engine.step)


class ProfiledLeg(RunningLeg):
    """Layer times under one strategy's compute, of which nothing is exchanged; see ``real.layer_times``."""

    def __init__(self, switch: EngineSwitch, leg: Leg, beat: Beat) -> None:
        super().__init__(switch, leg)
        switch.leave()
        self._measuring = ProfileLeg(switch.model, switch.optimizer, switch.communicators)
        self._steps = self._measuring.steps(leg, beat)
        self._handles: list[RemovableHandle] = []
        self._measured: dict[str, Any] | None = None
        self._advance()
        self._run_on(self._measuring.engine)
        switch.use(self.engine)  # which the leg itself closes, before the next change

    def step_done(self) -> bool:
        """See ``RunningLeg``."""
        self._num_steps += 1
        self._measuring.update_done()
        return self._advance()

    def part(self, *, complete: bool) -> dict[str, Any]:
        """See ``RunningLeg``."""
        if not complete:
            self._steps.close()
        self.engine.stopwatch.finish()
        found = not_finite(self.engine.stopwatch, self._switch.model, self._num_steps)
        return {"complete": complete, "num_steps": self._num_steps, "layer_times": self._measured, "not_finite": found}

    def _advance(self) -> bool:
        """Go on to the next step; whether there is none."""
        try:
            with keeping_gradients(self._switch.model):
                saved = next(self._steps)
        except StopIteration as end:
            self._measured = asdict(end.value)
            return True
        if saved is not None:
            self._count(saved)
        return False

    def _count(self, saved: SavedForBackward) -> None:
        """Count what the next forward in training saves."""
        model = self._switch.model

        def enter(*_: object) -> None:
            if model.training and torch.is_grad_enabled():
                saved.__enter__()
                self._handles.append(model.register_forward_hook(leave))

        def leave(*_: object) -> None:
            saved.__exit__(None, None, None)
            while self._handles:
                self._handles.pop().remove()

        self._handles.append(model.register_forward_pre_hook(enter))


@torch.no_grad()
def not_finite(stopwatch: Stopwatch, model: nn.Module, num_steps: int) -> dict[str, Any] | None:
    """What of a leg is NaN or infinite, and in which of its steps, from 1: the first loss, or a parameter at its end."""
    for number, timed in enumerate(stopwatch.steps, start=1):
        loss = timed.record.loss
        if loss is not None and not math.isfinite(loss):
            return {"what": f"the loss was {loss}", "step": number}
    if all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        return None
    return {"what": "a parameter was NaN or infinite", "step": num_steps}


def leg_of(leg: Leg, switch: EngineSwitch, beat: Beat) -> RunningLeg:
    """Begin what the driver has ordered."""
    return (ProfiledLeg if leg.profile else TimedLeg)(switch, leg, beat)
