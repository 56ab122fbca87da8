"""LayerClock: times a model's layers and the readiness of its gradients, by hooks.

A layer is a module that owns parameters; the time of modules without any, and of the loss,
belongs to the layer before. The backward is measured by when gradients are final, so that a
layer's backward is what passes until its last gradient is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle


@dataclass(slots=True)
class LayerTimes:
    """Nanoseconds of every profiled step of one rank, one inner list a step."""

    layers: list[str]
    gradients: list[tuple[str, int, str]]
    """Name, elements and type of every gradient, in registration order."""
    forward: list[list[int]] = field(default_factory=list)
    """Of every layer."""
    ready: list[list[int]] = field(default_factory=list)
    """From the end of the forward until each gradient is final."""
    backward: list[int] = field(default_factory=list)
    update: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    """The loop's own work: the batch, and the loss read back."""


class LayerClock:
    """Hooks a model between ``attach`` and ``detach``; ``end_step`` files the step's times."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._owners = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        dtype = {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in self._parameters.items()}
        self.times = LayerTimes(list(self._owners), [(name, item.numel(), dtype[name]) for name, item in self._parameters.items()])
        self._handles: list[RemovableHandle] = []
        self._entered: dict[str, int] = {}
        self._ready: dict[str, int] = {}
        self._begin = self._forward_end = self._backward_end = 0

    def attach(self) -> None:
        """Hook the model, its layers and its parameters."""
        self._handles += [
            self._model.register_forward_pre_hook(lambda *_: self._forward_begins()),
            self._model.register_forward_hook(lambda *_: self._forward_ends()),
            *(module.register_forward_pre_hook(self._enters(name)) for name, module in self._owners.items()),
            *(item.register_post_accumulate_grad_hook(self._on_gradient(name)) for name, item in self._parameters.items()),
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_step(self, *, step_ns: int, update_ns: int) -> None:
        """File the times of a step that took ``step_ns`` in all; what is neither compute nor update is ``read``."""
        entered = [self._begin, *sorted(self._entered.values())[1:], self._forward_end]
        spans = {name: later - earlier for name, earlier, later in zip(self._in_order(), entered, entered[1:], strict=False)}
        self.times.forward.append([spans.get(name, 0) for name in self.times.layers])
        self.times.ready.append([self._ready[name] - self._forward_end for name, _, _ in self.times.gradients])
        self.times.backward.append(self._backward_end - self._forward_end)
        self.times.update.append(update_ns)
        self.times.read.append(max(0, step_ns - update_ns - (self._backward_end - self._begin)))

    def _in_order(self) -> list[str]:
        return sorted(self._entered, key=lambda name: self._entered[name])

    def _forward_begins(self) -> None:
        self._entered.clear()
        self._ready.clear()
        self._begin = time.monotonic_ns()

    def _forward_ends(self) -> None:
        self._forward_end = time.monotonic_ns()

    def _enters(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self._entered.setdefault(name, time.monotonic_ns())

        return hook

    def _on_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(_parameter: torch.Tensor) -> None:
            if not self._ready:
                Variable._execution_engine.queue_callback(self._backward_ends)  # noqa: SLF001  # as DDP learns of the backward's end
            self._ready[name] = time.monotonic_ns()

        return hook

    def _backward_ends(self) -> None:
        self._backward_end = time.monotonic_ns()
