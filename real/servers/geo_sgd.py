"""GeoSGD on a trainer: the model that it trains (``latest``), the copy of what servers hold (``old``), and the rows touched since.

Its rounds are decided in ``fleetbench.plan.servers.sender`` and carried out by the thread of ``real.servers.sender``, which takes a delta
here, pushes it, and merges what its next pull brings. ``latest`` changes all the while: what is read of a row during an update makes a
delta of a part of the update; the rest is still in latest - old, and goes out later. ``latest +=`` alone must not meet an
update, so both take the guard; a merge takes it for a piece at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from fleetbench.plan.servers.rules import Shards
from real.servers.parameters import Parameters, read_values
from real.servers.shard import ROW, Change, read_tensor
from real.servers.wire import WireError

_PIECE = 1 << 18
"""Numbers that are merged while training waits: a tenth of a millisecond."""


class GeoCopy:
    """See the module. ``guard`` is held during each of the trainer's updates."""

    def __init__(self, parameters: Parameters, shards: Shards) -> None:
        self.guard = threading.Lock()
        self._parameters = parameters
        self._shards = shards
        self._old_dense = parameters.flat.clone()
        self._old = [table.clone() for table in parameters.tables]
        self._touched = [torch.zeros(len(table), dtype=torch.bool) for table in parameters.tables]
        self._spare = [torch.zeros_like(flags) for flags in self._touched]

    def mark(self, rows: Sequence[torch.Tensor | None]) -> None:
        """The step has touched these rows of each table."""
        with self.guard:
            for flags, own in zip(self._touched, rows, strict=True):
                if own is not None:
                    flags.index_fill_(0, own, value=True)

    def take(self, divisor: int) -> Change:
        """Delta = (latest - old) / divisor of the touched rows and of all dense parameters; old += delta."""
        with self.guard:
            self._touched, self._spare = self._spare, self._touched
        tables = []
        for table, old, flags in zip(self._parameters.tables, self._old, self._spare, strict=True):
            rows = flags.nonzero()[:, 0]
            flags.zero_()
            before = old.index_select(0, rows)
            delta = table.index_select(0, rows).sub_(before).div_(divisor)
            old.index_copy_(0, rows, before.add_(delta))
            tables.append((rows, delta))
        dense = None
        if len(self._old_dense):
            dense = (self._parameters.flat - self._old_dense).div_(divisor)
            self._old_dense += dense
        return Change(dense, tables)

    def give_up(self) -> None:
        """Latest = old, of everything: after an exchange that is what servers hold, but for what others have pushed since."""
        with self.guard:
            self._parameters.flat.copy_(self._old_dense)
            for table, old in zip(self._parameters.tables, self._old, strict=True):
                table.copy_(old)

    def merge(self, server: int, tensors: Sequence[memoryview]) -> None:
        """What a pull brought of one server: latest += server - old; old = server. Raises ``WireError`` for what is no such thing."""
        begin, end = self._shards.dense_range(server)
        flat, old_dense = self._parameters.flat[begin:end], self._old_dense[begin:end]
        held = read_values(tensors[0], flat)
        for latest, before, now in zip(flat.split(_PIECE), old_dense.split(_PIECE), held.split(_PIECE), strict=True):
            change = now - before
            with self.guard:
                latest.add_(change)
            before.copy_(now)
        for table, old, rows_body, body in zip(self._parameters.tables, self._old, tensors[1::2], tensors[2::2], strict=True):
            rows = read_tensor(rows_body, ROW, (-1,)).to(torch.int64) * self._shards.servers + server
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(table):
                raise WireError("a row that the table does not have")
            values = read_values(body, table, len(rows))
            per_piece = max(1, _PIECE // table.shape[1])
            for own, held_rows in zip(rows.split(per_piece), values.split(per_piece), strict=True):
                if not len(own):
                    continue
                change = held_rows - old.index_select(0, own)
                with self.guard:
                    table.index_add_(0, own, change)
                old.index_copy_(0, own, held_rows)
