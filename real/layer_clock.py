"""LayerClock: times a model's layers and the readiness of its gradients, by hooks.

A layer is a module that owns parameters; the time of modules without any, and of the loss,
belongs to the layer before. The backward is measured by when gradients are final, so that a
layer's backward is what passes until its last gradient is.

Inside a compiled block no hook runs: the whole block is filed under the last of its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils.hooks import RemovableHandle

from real.communication.clocks import Clock, Mark


@dataclass(slots=True)
class LayerTimes:
    """Nanoseconds of every profiled step of one rank, one inner list a step."""

    layers: list[str]
    """Modules that own parameters, in registration order."""
    gradients: list[tuple[str, int, str]]
    """Name, elements and type of every gradient, in registration order."""
    forward: list[list[int]] = field(default_factory=list)
    """Of every layer."""
    ready: list[list[int | None]] = field(default_factory=list)
    """From the end of the forward until each gradient is final; none for a gradient that did not come."""


@dataclass(slots=True)
class _Step:
    """Marks of one step."""

    begin: Mark
    forward_end: Mark = None
    entered: dict[str, Mark] = field(default_factory=dict)
    ready: dict[str, Mark] = field(default_factory=dict)


class LayerClock:
    """Hooks a model between ``attach`` and ``detach``; ``keep`` files the step that has passed.

    A step: ``forward`` (the model's own, from its hook to its hook; layers that are entered are
    marked) -> ``backward`` (what checkpoints compute again is no forward; gradients are marked).
    Forwards in evaluation mode or without gradients are not seen.
    """

    def __init__(self, model: torch.nn.Module, clock: Clock | None = None) -> None:
        self._model = model
        self._clock = clock or Clock()
        with_parameters = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters())}
        self._modules = {name: module for name, module in with_parameters.items() if name}
        self._layers = [name for name, module in with_parameters.items() if any(True for _ in module.parameters(recurse=False))]
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._handles: list[RemovableHandle] = []
        self._step: _Step | None = None
        self._in_forward = False
        self._kept: list[_Step] = []
        self.current = self._layers[0]
        """The layer that was entered last."""

    def attach(self) -> None:
        """Hook the model, its modules and its parameters."""
        self._handles += [
            self._model.register_forward_pre_hook(lambda *_: self._forward_begins()),
            self._model.register_forward_hook(lambda *_: self._forward_ends()),
            *(module.register_forward_pre_hook(self._enters(name)) for name, module in self._modules.items()),
            *(item.register_post_accumulate_grad_hook(self._on_gradient(name)) for name, item in self._parameters.items()),
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def keep(self) -> None:
        """File the last step among ``times``."""
        assert self._step is not None
        self._kept.append(self._step)
        self._step = None

    def times(self) -> LayerTimes:
        """Of the steps that were kept; waits for the device."""
        dtype = {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in self._parameters.items()}
        times = LayerTimes(list(self._layers), [(name, item.numel(), dtype[name]) for name, item in self._parameters.items()])
        for step in self._kept:
            times.forward.append(self._forward_of(step))
            times.ready.append(self._ready_of(step))
        return times

    def _forward_of(self, step: _Step) -> list[int]:
        """What passes from each layer's entry to the next one's; the first begins with the step, the last ends with the forward."""
        names = list(step.entered)
        begin, *entered, end = self._clock.resolve([step.begin, *step.entered.values(), step.forward_end])
        at = dict(zip(names, entered, strict=True))
        entry = {name: at.get(_nearest(name, at), begin) for name in self._layers}
        order = sorted(self._layers, key=lambda name: (entry[name], name in at))  # of those entered with it, the module itself has the time
        bounds = [begin, *(entry[name] for name in order[1:]), end]
        spans = {name: bounds[index + 1] - bounds[index] for index, name in enumerate(order)}
        return [spans[name] for name in self._layers]

    def _ready_of(self, step: _Step) -> list[int | None]:
        forward_end, *times = self._clock.resolve([step.forward_end, *step.ready.values()])
        ready = dict(zip(step.ready, (time - forward_end for time in times), strict=True))
        return [ready.get(name) for name in self._parameters]

    def _forward_begins(self) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self._model.training:
            return
        self._step = _Step(self._clock.mark())
        self._in_forward = True

    def _forward_ends(self) -> None:
        if self._in_forward and self._step is not None:
            self._step.forward_end = self._clock.mark()
            self._in_forward = False

    def _enters(self, name: str) -> Callable[..., None]:
        is_layer = name in self._layers

        def hook(*_: object) -> None:
            if torch.compiler.is_compiling():  # within a graph there is no time to tell, and asking for it would break the graph
                return
            if self._in_forward and self._step is not None:
                self._step.entered.setdefault(name, self._clock.mark())
                if is_layer:
                    self.current = name

        return hook

    def _on_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(_parameter: torch.Tensor) -> None:
            if self._step is not None and not self._in_forward:
                self._step.ready[name] = self._clock.mark()

        return hook


def _nearest(name: str, entered: dict[str, int]) -> str:
    """The module itself, or the innermost around it that was entered; nothing where only the model was."""
    while name and name not in entered:
        name = name.rpartition(".")[0]
    return name
