"""Uneven inputs: trainers without data take part, with zeros, in the exchanges of trainers that have more.

torch's ``Join`` detects which trainers have data. A trainer that has data announces what it exchanges next: a model's
buffers, before a forward, or its gradients, in a backward. Evaluations, backwards inside ``no_sync`` and several
backwards before a step therefore need no special rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.algorithms import Join, Joinable, JoinHook

from fleetbench.errors import ConfigError
from real.communication.communicators import Communicators
from real.engine.fleet_engine import FleetEngine


class UnevenInputs(Joinable):  # type: ignore[misc]  # torch's, untyped
    """Models that trainers train on different numbers of batches.

    Every trainer enters and leaves ``joined`` at the same place of its script.
    """

    def __init__(self, engines: Sequence[FleetEngine], communicators: Communicators) -> None:
        super().__init__()
        self._engines = tuple(engines)
        self._communicators = communicators

    @property
    def join_device(self) -> torch.device:
        """Device of the messages of torch's ``Join``."""
        return self._communicators.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Process group of the messages of torch's ``Join``."""
        return self._communicators.uneven

    def join_hook(self, **_: Any) -> JoinHook:
        """Return the hook by which torch's ``Join`` lets a trainer without data take part."""
        return _Shadow(self)

    @contextmanager
    def joined(self, where: str, *, throws: bool) -> Iterator[None]:
        """Let trainers take different numbers of steps inside; at the end, all get the model of the last to step."""
        for engine in self._engines:
            engine.begin_uneven(where)
        for index, engine in enumerate(self._engines):
            engine.announce = partial(self._announce, 2 * index)
            engine.executor.buffers_from = partial(self._announce_buffers, 2 * index + 1)
        try:
            with Join([self], throw_on_early_termination=throws):
                yield
        finally:
            for engine in self._engines:
                engine.announce = engine.executor.buffers_from = None

    def _announce(self, what: int) -> None:
        """Announce the next exchange to trainers without data: 2 x the model's index, plus 1 for its buffers."""
        if what % 2 == 0 and any(engine.is_exchanging for engine in self._engines):
            why = "passes through several models, whose gradients are ready in turns, and trainers without data could not follow"
            hint = "give every model a loss of its own, or every trainer as many batches"
            raise ConfigError(why, "loss.backward()", f"{len(self._engines)} models in fleet.join()", hint)
        if (work := Join.notify_join_context(self)) is not None:
            work.wait()
        self.largest(what)

    def _announce_buffers(self, what: int) -> int:
        self._announce(what)
        return self.largest(self._communicators.rank)

    def shadow(self) -> None:
        """Take part, as a trainer without data, in the next exchange of the trainers that have data."""
        engine, is_buffers = self._engines[(told := self.largest(-1)) // 2], told % 2 == 1
        if is_buffers:
            engine.executor.send_buffers(self.largest(-1))
        else:
            engine.shadow_backward()

    def take_last(self, *, is_last: bool) -> None:
        """Take model and training state of the last trainer with data; of several, of the one with the largest rank."""
        source = self.largest(self._communicators.rank if is_last else -1)
        for engine in self._engines:
            engine.end_uneven(source)

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""
        return self._communicators.largest(number)


class _Shadow(JoinHook):  # type: ignore[misc]  # as above
    def __init__(self, uneven: UnevenInputs) -> None:
        self._uneven = uneven

    def main_hook(self) -> None:
        self._uneven.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._uneven.take_last(is_last=is_last_joiner)
