"""Traffic: how many bytes the messages of a job carry.

The rows that a step touches are known from the data (``KnownRows``), or only their number is. In the second
case, messages have the mean number of distinct rows that their steps touch together: n independent draws, of
row r with probability p_r, touch sum over r of 1 - (1 - p_r)^n rows in the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetbench.plan.layers import DTYPE_BYTES, Gradient
from fleetbench.plan.servers.rules import Shards

ROW_NUMBER_BYTES = 4
Part = tuple[int, int, int]
"""Consecutive steps of one trainer: its rank, the index of the first step, and the number of steps."""
LookUps = tuple[tuple[tuple[tuple[int, npt.NDArray[np.int64]], ...], ...], ...]
"""Table and distinct rows of each look-up, by rank, index of the step, and number of the look-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchedRows:
    """An embedding, some of whose rows each step touches."""

    rows: int
    row_bytes: int
    """Bytes of one row's values."""
    draws: float
    """Number of rows that a step draws, with repetitions."""
    number_bytes: int = ROW_NUMBER_BYTES
    """Bytes of one row's number."""

    def distinct(self, steps: int) -> float:
        """Return the mean number of distinct rows that ``steps`` steps touch together."""
        return (
            self.rows * -float(np.expm1(self.draws * steps * np.log1p(-1.0 / self.rows)))
            if self.rows > 1
            else float(self.draws * steps > 0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Sizes of messages in bytes. Parameters and gradients are split evenly over the servers."""

    servers: int
    dense_bytes: int = 0
    """Bytes of all dense parameters, or of their gradients."""
    tables: tuple[TouchedRows, ...] = ()
    header_bytes: int = 0
    """Bytes of every message's header."""

    def push(self, steps: int) -> int:
        """Return the bytes of a push of ``steps`` steps to one server, with all dense numbers.

        An answer to a pull, with the rows that ``steps`` steps of others changed, has the same size.
        """
        rows = sum(table.distinct(steps) * (table.row_bytes + table.number_bytes) for table in self.tables) if steps else 0.0
        return self._share(self.dense_bytes + rows)

    def pushed(self, server: int, parts: Sequence[Part]) -> int:  # noqa: ARG002  # all servers alike
        """Return the bytes of a push of all steps of ``parts`` to ``server``; see ``push``."""
        return self.push(sum(count for _, _, count in parts))

    def num_look_ups(self, rank: int, step: int) -> int:  # noqa: ARG002  # one in each table
        """Return the number of look-ups that trainer ``rank`` makes in its step with index ``step``, from 0."""
        return len(self.tables)

    def looked_up(self, server: int, rank: int, step: int, number: int) -> tuple[int, int]:  # noqa: ARG002  # all alike
        """Return the bytes of a look-up to a server, which holds row numbers, and those of its answer."""
        table = self.tables[number]
        return self._share(table.distinct(1) * table.number_bytes), self._share(table.distinct(1) * table.row_bytes)

    def _share(self, nbytes: float) -> int:
        return self.header_bytes + round(nbytes / self.servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRows(Traffic):
    """Sizes of messages whose rows, and the servers that hold these, are known."""

    shards: Shards
    itemsize: int
    look_ups: LookUps

    def pushed(self, server: int, parts: Sequence[Part]) -> int:
        """See ``Traffic``."""
        nbytes = len(range(self.shards.dense)[self.shards.dense_part(server)]) * self.itemsize
        steps = [step for rank, first, count in parts for step in self.look_ups[rank][first : first + count]]
        for number, table in enumerate(self.shards.tables):
            touched = [rows for step in steps for other, rows in step if other == number]
            num = self._num_held(server, np.unique(np.concatenate(touched))) if touched else 0
            nbytes += num * (table.width * self.itemsize + ROW_NUMBER_BYTES)
        return self.header_bytes + nbytes

    def num_look_ups(self, rank: int, step: int) -> int:
        """See ``Traffic``."""
        return len(self.look_ups[rank][step])

    def looked_up(self, server: int, rank: int, step: int, number: int) -> tuple[int, int]:
        """See ``Traffic``."""
        table, rows = self.look_ups[rank][step][number]
        num = self._num_held(server, rows)
        return self.header_bytes + num * ROW_NUMBER_BYTES, self.header_bytes + num * self.shards.tables[table].width * self.itemsize

    def _num_held(self, server: int, rows: npt.NDArray[np.int64]) -> int:
        return int((rows % self.servers == server).sum())


def traffic_of(gradients: Sequence[Gradient], servers: int) -> Traffic:
    """Return the traffic of a layer table's gradients.

    All rows of a sparse gradient are touched equally often, and independently of each other. If a gradient's
    width is unknown, each element is a row, whose number takes no bytes; see ``Gradient.width``.
    """
    dense = sum(gradient.nbytes for gradient in gradients if not gradient.sparse)
    tables = []
    for gradient in gradients:
        if gradient.sparse and gradient.numel:
            share, width = min(1.0, (gradient.touched or gradient.numel) / gradient.numel), gradient.width or 1
            rows = gradient.numel // width
            draws = float("inf") if share == 1.0 or rows == 1 else float(np.log1p(-share) / np.log1p(-1.0 / rows))
            number_bytes = ROW_NUMBER_BYTES if gradient.width else 0
            row_bytes = width * DTYPE_BYTES[gradient.dtype]
            tables.append(TouchedRows(rows=rows, row_bytes=row_bytes, draws=draws, number_bytes=number_bytes))
    return Traffic(servers=servers, dense_bytes=dense, tables=tuple(tables))
