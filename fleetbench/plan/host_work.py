"""StepHead: what a trainer's host does from the start of a step to the start of its forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from fleetbench.plan.layers import LayerTable


class StepHead:
    """Reads results back now and then, takes a batch, and does what else the loop does; the same in every executor.

    The i-th step of a trainer, i = 0 for the first, starts at S_i. Results of steps before it are read back
    every n-th step: F_i = S_i + ``fetch`` where i > 0 and i is a multiple of ``fetch_every`` n, else S_i. Then
    the batch is taken at T_i, and the forward begins at T_i + ``read``.

    ``loaders`` w processes make batches beside compute, in turn, each in ``load``; ``prefetch`` q a loader may be
    asked for and not taken, d = w q in all, and another is asked for whenever one is taken (torch's
    ``DataLoader``, ``torch/utils/data/dataloader.py``, ``_try_put_index``). Batch i is ready at
    P_i = max(P_{i - w}, T_{i - d}) + ``load``, with the start of training where the index is negative, and
    T_i = max(F_i, P_i). So a trainer whose step is longer than ``load`` / w waits for no batch, and one whose
    step is shorter takes a step each ``load`` / w. Without loaders the loop makes it itself: T_i = F_i + ``load``.

    Times are integer nanoseconds of one clock; ``forward_begins`` is called once a step, in order.
    """

    def __init__(self, table: LayerTable, fetch_every: int, begin_ns: int, latest: Callable[[Any, Any], Any] = max) -> None:
        """``begin_ns`` is when loaders start; ``latest`` of two times: with ``numpy.maximum``, times are arrays of ranks."""
        self._table = table
        self._latest = latest
        self._fetch_every = fetch_every
        self._num_steps = 0
        outstanding = table.loaders * table.prefetch
        self._ready = deque([begin_ns] * table.loaders, maxlen=table.loaders)
        self._taken = deque([begin_ns] * outstanding, maxlen=outstanding)

    def forward_begins(self, start_ns: int) -> int:
        """When the forward of the step that starts at ``start_ns`` begins."""
        is_fetching = self._num_steps > 0 and self._num_steps % self._fetch_every == 0
        self._num_steps += 1
        asked_ns = start_ns + (self._table.fetch if is_fetching else 0)
        return self._take(asked_ns) + self._table.read

    def _take(self, asked_ns: int) -> int:
        if not self._table.loaders:
            return asked_ns + self._table.load
        self._ready.append(self._latest(self._ready[0], self._taken[0]) + self._table.load)
        self._taken.append(self._latest(asked_ns, self._ready[-1]))
        return self._taken[-1]
