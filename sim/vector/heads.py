"""Heads: the time from every step's start to its forward, for arrays of ranks; see ``fleetbench.plan.step_head``."""

from __future__ import annotations

from collections import deque

import numpy as np

from fleetbench.plan.layers import LayerTable
from sim.vector.groups import Times


class Heads:
    """Heads of steps that follow from nothing before them."""

    def __init__(self, table: LayerTable, fetch_every: int, num_steps: int) -> None:
        step = np.arange(num_steps)
        fetches = (step > 0) & (step % fetch_every == 0)
        self._fetch_ns = np.where(fetches, int(table.fetch), 0)
        self._known_ns = self._fetch_ns + int(table.load) + int(table.read)
        self._table = table
        outstanding = table.loaders * table.prefetch
        zero = np.zeros((1, 1), dtype=np.int64)
        self._ready = deque([zero] * table.loaders, maxlen=table.loaders)
        self._taken = deque([zero] * outstanding, maxlen=outstanding)

    @property
    def most_ns(self) -> int:
        """What one of them takes at most, with all batches still to be made."""
        table = self._table
        return table.fetch + table.read + table.load * (2 if self.is_remembered else 1)

    @property
    def is_remembered(self) -> bool:
        """Loaders are ahead or behind, so that a head follows from steps before it."""
        return self._table.loaders > 0

    def known(self, first: int, stride: int, count: int) -> Times:
        """What the heads of steps ``first``, ``first + stride``, ... take, without loaders; shape ``(count, 1)``."""
        return self._known_ns[first : first + stride * count : stride, None]

    def following(self, step: int, start: Times) -> Times:
        """What the head of the next step takes, which starts at ``start``; loaders began at 0."""
        if not self.is_remembered:
            return self.known(step, 1, 1)
        asked = start + self._fetch_ns[step]
        self._ready.append(np.maximum(self._ready[0], self._taken[0]) + int(self._table.load))
        self._taken.append(np.maximum(asked, self._ready[-1]))
        return np.asarray(self._taken[-1] + int(self._table.read) - start)
