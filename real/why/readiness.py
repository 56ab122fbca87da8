"""Readiness: when a model's gradients are ready in its backward."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from fleetbench.why.observed import Readiness
from real.why.events import clock


class ReadinessClock:
    """Hooks a model and its parameters while it is ``on``."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._trained = {name: parameter for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}
        self._begun = 0
        self._forwards: list[tuple[int, int]] = []
        self._ready: list[dict[str, int]] = []
        """Of each forward's backward, by parameter."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Note forwards with gradients, and their backwards."""
        handles = [
            self._ddp.register_forward_pre_hook(lambda *_: self._begins()),
            self._ddp.register_forward_hook(lambda *_: self._ends()),
            *(each.register_post_accumulate_grad_hook(partial(self._is_ready, name)) for name, each in self._trained.items()),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def found(self) -> Readiness:
        """Medians of the steps that were noted. Raises ``ValueError`` if there is none."""
        whole = [(forward, ready) for forward, ready in zip(self._forwards, self._ready, strict=True) if ready]
        if not whole:
            raise ValueError("no backward was noted")
        ready = [[at[name] - end for (_, end), at in whole if name in at] for name in self._trained]
        return Readiness(
            names=tuple(self._trained),
            numels=tuple(each.numel() for each in self._trained.values()),
            dtypes=tuple(str(each.dtype).removeprefix("torch.") for each in self._trained.values()),
            ready_ns=tuple(_median(times) for times in ready),
            forward_ns=_median(end - begin for (begin, end), _ in whole),
            backward_ns=_median(max(at.values()) - end for (_, end), at in whole),
            unused=tuple(name for name, times in zip(self._trained, ready, strict=True) if len(times) < len(whole)),
        )

    def _begins(self) -> None:
        self._begun = clock()

    def _ends(self) -> None:
        if torch.is_grad_enabled():
            self._forwards.append((self._begun, clock()))
            self._ready.append({})

    def _is_ready(self, name: str, _parameter: torch.Tensor) -> None:
        if self._ready:
            self._ready[-1][name] = clock()


def _median(times: Iterable[int]) -> int:
    found = list(times)
    return round(statistics.median(found)) if found else 0
