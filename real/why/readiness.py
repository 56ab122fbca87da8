"""Readiness: when a model's gradients are ready in its backward."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fleetbench.why.observed import Readiness
from real.sharding.waits import replaced
from real.why.events import clock


class ReadinessClock:
    """Records when a model's gradients are ready, with hooks that exist inside the context ``on``."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._trained = {name: parameter for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}
        self._begun = 0
        """Start of the last backward in ns."""
        self._ready: dict[str, int] = {}
        """Nanoseconds from that start until each gradient was ready."""
        self._steps: list[dict[str, int]] = []
        """For each earlier step: nanoseconds until each gradient was ready, in its last backward with gradients."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record backwards."""
        handles = [each.register_post_accumulate_grad_hook(partial(self._is_ready, name)) for name, each in self._trained.items()]
        try:
            with replaced(torch.autograd, "backward", self._backward):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def step_ends(self) -> None:
        """Handle the end of an optimizer step."""
        if self._ready:
            self._steps.append(self._ready)
            self._ready = {}

    def found(self) -> Readiness | None:
        """Return medians over the steps so far; ``None`` if there are none."""
        if not self._steps:
            return None
        return Readiness(
            names=tuple(self._trained),
            nbytes=tuple(each.numel() * each.element_size() for each in self._trained.values()),
            ready_ns=tuple(median_ns(step[name] for step in self._steps if name in step) for name in self._trained),
            unused=tuple(name for name in self._trained if any(name not in step for step in self._steps)),
        )

    def _backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*arguments: Any, **named: Any) -> Any:
            self._begun, self._ready = clock(), {}
            return function(*arguments, **named)

        return backward

    def _is_ready(self, name: str, _parameter: torch.Tensor) -> None:
        if self._begun:
            self._ready[name] = clock() - self._begun


def median_ns(times: Iterable[int]) -> int:
    """Return the median of nanoseconds, 0 if there are none."""
    found = list(times)
    return round(statistics.median(found)) if found else 0
