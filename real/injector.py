"""Injected stragglers: X times the profiled time, slept before each layer's forward and backward.

Sleeps aim at cumulative totals, so that one sleep's lateness shortens the next and does not add
up over the layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fleetbench.plan.layers import LayerTable
from fleetbench.stragglers import ONE

_SHORTEST_SLEEP_NS = 50_000  # below the kernel's timer slack a sleep overshoots by more than itself


class Injector:
    """Delays a model's layers by a share of their profiled times.

    Life cycle: ``attach``; every step ``begin`` with the step's X, then the model's hooks, then
    ``finish`` at the end of the backward; ``detach``.
    """

    def __init__(self, table: LayerTable, sleep: Callable[[float], None] = time.sleep) -> None:
        self._table = table
        self._sleep = sleep
        self._handles: list[RemovableHandle] = []
        self._x = 0
        self._slept_ns = 0

    def attach(self, model: torch.nn.Module) -> None:
        """Hook the layers that the table names."""
        modules = dict(model.named_modules())
        total = 0
        before_backward = self._table.forward_ns + self._table.backward_ns
        for layer in self._table.layers:
            total += layer.forward
            module = modules.get(layer.name)
            if module is not None:
                self._handles.append(module.register_forward_pre_hook(self._on_forward(total)))
                self._handles.append(module.register_forward_hook(self._on_output(before_backward)))
            before_backward -= layer.backward

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self, x: int) -> None:
        """Start a step whose compute takes 1 + X times its own; ``x`` is X in units of 2^-24."""
        self._x, self._slept_ns = x, 0

    def finish(self) -> None:
        """Sleep what is left of the step's X."""
        self._until(self._table.forward_ns + self._table.backward_ns)

    def _until(self, base_ns: int) -> None:
        """Sleep until the step's sleeps amount to X times ``base_ns``."""
        missing = base_ns * self._x // ONE - self._slept_ns
        if missing >= _SHORTEST_SLEEP_NS:
            begin = time.monotonic_ns()
            self._sleep(missing * 1e-9)
            self._slept_ns += time.monotonic_ns() - begin

    def _on_forward(self, base_ns: int) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _inputs: Any) -> None:
            if torch.is_grad_enabled():
                self._until(base_ns)

        return hook

    def _on_output(self, base_ns: int) -> Callable[..., None]:
        """The gradient of a layer's output arrives where the layer's backward begins."""

        def on_gradient(_gradient: torch.Tensor) -> None:
            self._until(base_ns)

        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(on_gradient)

        return hook
