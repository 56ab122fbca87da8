"""Shard: what one server holds, and what it does with pushes and pulls. No sockets, and no decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from real.servers.optimizers import Array, Updates
from real.servers.spec import DTYPES, Spec
from real.servers.wire import Head, WireError, numbers

ROW = np.dtype(np.int32)
"""Rows on the wire: their number on the server, which is the row divided by the number of servers."""
VERSION = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient, a delta, or parameters: this shard's part."""

    dense: Array
    """Empty where the push has none."""
    rows: tuple[Array, ...]
    """Of each table, in ascending order, each once."""
    values: tuple[Array, ...]
    rate: float
    versions: Array
    """Of each gradient in it: updates in what it was computed from."""


class Shard:
    """Part ``server`` of a model's parameters, with its optimizer's state. Raises ``WireError`` for what does not fit it."""

    def __init__(self, spec: Spec, server: int) -> None:
        self.spec = spec
        self.server = server
        dtype = DTYPES[spec.dtype]
        begin, end = spec.shards.dense_range(server)
        self._changed: list[list[Array]] = []
        self._sent: dict[int, tuple[Array, ...]] = {}
        try:
            self.dense: Array = np.zeros(end - begin, dtype)
            self.tables: list[Array] = [
                np.zeros((spec.shards.num_rows(number, server), table.width), dtype) for number, table in enumerate(spec.tables)
            ]
            self.optimizer = Updates(spec.optimizer, spec.options, self.arrays)
            self._changed = self._none_changed()
        except (MemoryError, ValueError) as error:  # numpy's words for what does not fit into memory, or into a size
            raise WireError(f"a model for which server {server} has no memory: {error}") from error

    def adopt(self, spec: Spec) -> None:
        """Go on with the rules and options of ``spec``, which is of this model and optimizer; no trainer has seen anything yet."""
        self.spec = spec
        self.optimizer.options = spec.options
        self._changed, self._sent = self._none_changed(), {}
        self.mark_all()

    def _none_changed(self) -> list[list[Array]]:
        """In GeoSGD, of each trainer, which rows of each table others have changed."""
        rules = self.spec.rules
        num = rules.trainers if rules.mode == "geo_sgd" else 0
        return [[np.zeros(len(table), np.bool_) for table in self.tables] for _ in range(num)]

    @property
    def arrays(self) -> list[Array]:
        """Dense parameters, then the tables."""
        return [self.dense, *self.tables]

    def read_push(self, head: Head, tensors: Sequence[memoryview]) -> Push:
        """A push off the wire: versions, dense numbers, and rows and values of each table."""
        if len(tensors) != 2 + 2 * len(self.tables):
            raise WireError(f"{len(tensors)} tensors instead of {2 + 2 * len(self.tables)}")
        if not math.isfinite(head.rate):
            raise WireError(f"a learning rate of {head.rate}")
        versions = numbers(tensors[0], VERSION, (-1,))
        if versions.min(initial=0) < 0:
            raise WireError("a gradient of parameters before the first")
        dense = numbers(tensors[1], self.dense.dtype, (-1,))
        if len(dense) not in (0, len(self.dense)):
            raise WireError(f"{len(dense)} dense numbers instead of {len(self.dense)}")
        rows = tuple(self._read_rows(number, body) for number, body in enumerate(tensors[2::2]))
        if any((np.diff(own) <= 0).any() for own in rows):
            raise WireError("rows that are not in ascending order, each once")
        values = tuple(
            numbers(body, table.dtype, (len(own), table.shape[1]))
            for body, own, table in zip(tensors[3::2], rows, self.tables, strict=True)
        )
        return Push(dense, rows, values, head.rate, versions)

    def read_rows(self, tensors: Sequence[memoryview]) -> list[Array]:
        """The rows of each table that a look-up asks for."""
        if len(tensors) != len(self.tables):
            raise WireError(f"rows of {len(tensors)} tables instead of {len(self.tables)}")
        return [self._read_rows(number, body) for number, body in enumerate(tensors)]

    def install(self, push: Push) -> None:
        """Overwrite a piece of the parameters."""
        if len(push.dense):
            self.dense[:] = push.dense
        for table, rows, values in zip(self.tables, push.rows, push.values, strict=True):
            table[rows] = values

    def update(self, pushes: Sequence[Push], divisor: int) -> None:
        """The optimizer's step by the sum of the pushes, added in their order, over ``divisor``."""
        rate = pushes[-1].rate
        if len(pushes) == 1 and divisor == 1:
            (push,) = pushes
            self.optimizer.update(0, push.dense, rate)
            for number, (rows, values) in enumerate(zip(push.rows, push.values, strict=True), 1):
                self.optimizer.update(number, values, rate, rows)
            return
        dense = [push.dense for push in pushes if len(push.dense)]
        if dense:
            total = dense[0].copy()
            for more in dense[1:]:
                total += more
            self.optimizer.update(0, total / divisor, rate)
        for number in range(len(self.tables)):
            rows, values = add_rows([(push.rows[number], push.values[number]) for push in pushes])
            self.optimizer.update(1 + number, values / divisor, rate, rows)

    def accumulate(self, push: Push) -> None:
        """Add a delta."""
        if len(push.dense):
            self.dense += push.dense
        for table, rows, values in zip(self.tables, push.rows, push.values, strict=True):
            table[rows] += values

    def mark(self, rank: int, push: Push) -> None:
        """The rows of ``rank``'s push have changed for all other trainers."""
        for other, changed in enumerate(self._changed):
            if other != rank:
                for flags, rows in zip(changed, push.rows, strict=True):
                    flags[rows] = True

    def mark_all(self) -> None:
        """Nobody has seen anything of what is held here."""
        for changed in self._changed:
            for flags in changed:
                flags[:] = True

    def parameters(self, rank: int, *, again: bool = False) -> list[Array]:
        """What a pull is answered with: dense numbers, then of each table the rows that others changed, and their values.

        ``again``: for a pull that was answered before, the same rows; they are not forgotten twice.
        """
        if not self._changed:
            return [self.dense.copy()]
        if not (again and rank in self._sent):
            self._sent[rank] = tuple(np.flatnonzero(flags).astype(ROW) for flags in self._changed[rank])
            for flags in self._changed[rank]:
                flags[:] = False
        return [self.dense.copy(), *self._of_rows(self._sent[rank])]

    @property
    def not_finite(self) -> tuple[str, ...]:
        """What holds a number that is none (NaN), or infinite: the dense parameters as a whole, and embeddings by name."""
        names = ("the dense parameters", *(f"embedding {table.name}" for table in self.spec.tables))
        held = zip(names, self.arrays, strict=True)
        return tuple(name for name, array in held if array.size and not (math.isfinite(array.min()) and math.isfinite(array.max())))

    def look_up(self, rows: Sequence[Array]) -> list[Array]:
        """The values of each table's rows."""
        return [table[own] for table, own in zip(self.tables, rows, strict=True)]

    def everything(self, rank: int) -> list[Array]:
        """All there is: dense numbers, then the tables. What had changed for ``rank`` is no news any more."""
        if self._changed:
            for flags in self._changed[rank]:
                flags[:] = False
        return [array.copy() for array in self.arrays]

    def _of_rows(self, rows: Sequence[Array]) -> list[Array]:
        return [part for own, table in zip(rows, self.tables, strict=True) for part in (own, table[own])]

    def _read_rows(self, number: int, body: memoryview) -> Array:
        rows = numbers(body, ROW, (-1,))
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self.tables[number])):
            raise WireError(f"a row that table {self.spec.tables[number].name} does not have on server {self.server}")
        return rows


def add_rows(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Sum of sparse tensors, each of distinct rows: distinct rows in ascending order, and their sums, added in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    every = np.concatenate([rows for rows, _ in parts])
    rows, where = np.unique(every, return_inverse=True)
    values = np.zeros((len(rows), *parts[0][1].shape[1:]), parts[0][1].dtype)
    begin = 0
    for own, added in parts:
        values[where[begin : begin + len(own)]] += added
        begin += len(own)
    return rows, values
