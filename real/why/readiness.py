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
        self._ddp = ddp
        self._trained = {name: parameter for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}
        self._begun = 0
        """Start of the current forward with gradients in ns; 0 outside of one."""
        self._forwards: list[tuple[int, int]] = []
        """Start and end of each forward of the current step, in ns."""
        self._ready: list[dict[str, int]] = []
        """Times in ns at which gradients were ready after each forward of the current step, by parameter."""
        self._steps: list[tuple[int, int, dict[str, int]]] = []
        """For each earlier step, nanoseconds of compute before its last backward, of that backward, and from
        its start until each gradient is ready."""
        self._unused: set[str] = set()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record forwards with gradients, and their backwards."""
        handles = [
            self._ddp.register_forward_pre_hook(lambda *_: self._begins()),
            self._ddp.register_forward_hook(lambda *_: self._ends()),
            *(each.register_post_accumulate_grad_hook(partial(self._is_ready, name)) for name, each in self._trained.items()),
        ]
        try:
            with replaced(torch.autograd, "backward", self._after_forward):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def step_ends(self) -> None:
        """Handle the end of an optimizer step."""
        took = [end - begin for begin, end in self._forwards]
        whole = [(end, ready) for (_, end), ready in zip(self._forwards, self._ready, strict=True) if ready]
        self._forwards, self._ready = [], []
        if not whole:
            return
        self._unused |= {name for _, ready in whole for name in self._trained if name not in ready}
        *before, (end, ready) = whole
        backwards = [max(at.values()) - of for of, at in before]
        self._steps.append((sum(took) + sum(backwards), max(ready.values()) - end, {name: at - end for name, at in ready.items()}))

    def found(self) -> Readiness | None:
        """Return medians over the steps so far; ``None`` if there are none."""
        if not self._steps:
            return None
        ready = [[at[name] for _, _, at in self._steps if name in at] for name in self._trained]
        return Readiness(
            names=tuple(self._trained),
            nbytes=tuple(each.numel() * each.element_size() for each in self._trained.values()),
            ready_ns=tuple(median_ns(times) for times in ready),
            forward_ns=median_ns(before for before, _, _ in self._steps),
            backward_ns=median_ns(last for _, last, _ in self._steps),
            unused=tuple(name for name in self._trained if name in self._unused),
        )

    def _begins(self) -> None:
        self._begun = clock() if torch.is_grad_enabled() else 0

    def _ends(self) -> None:
        if self._begun:
            self._forwards.append((self._begun, clock()))
            self._ready.append({})
        self._begun = 0

    def _after_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a backward end the forward that contains it, as in Lightning's manual optimization."""

        def backward(*arguments: Any, **named: Any) -> Any:
            self._ends()
            return function(*arguments, **named)

        return backward

    def _is_ready(self, name: str, _parameter: torch.Tensor) -> None:
        if self._ready:
            self._ready[-1][name] = clock()


def median_ns(times: Iterable[int]) -> int:
    """Return the median of nanoseconds, 0 if there are none."""
    found = list(times)
    return round(statistics.median(found)) if found else 0
