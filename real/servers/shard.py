"""Shard: what one server holds, and how it reads pushes and look-ups off the wire. No sockets, and no decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fleetbench.workloads.served import DTYPES, ROW, Array, Change, ParameterShard
from real.servers.spec import Spec
from real.servers.wire import Head, WireError, numbers

VERSION = np.dtype(np.int64)


class Shard(ParameterShard):
    """Part ``server`` of a model's parameters, with its optimizer's state. Raises ``WireError`` for what does not fit it."""

    def __init__(self, spec: Spec, server: int) -> None:
        self.spec = spec
        try:
            super().__init__(spec.shards, server, DTYPES[spec.dtype], (spec.optimizer, spec.options), _readers(spec))
        except (MemoryError, ValueError) as error:  # numpy's words for what does not fit into memory, or into a size
            raise WireError(f"a model for which server {server} has no memory: {error}") from error

    def adopt(self, spec: Spec) -> None:
        """Go on from a checkpoint with the rules and options of ``spec``, of this model and optimizer; no trainer has seen anything yet."""
        self.spec, self.optimizer.options, self._sent = spec, spec.options, {}
        self._changed = self._flags(_readers(spec), changed=True)

    def read_push(self, head: Head, tensors: Sequence[memoryview]) -> Change:
        """A push off the wire: versions, dense numbers, and rows and values of each table."""
        if len(tensors) != 2 + 2 * len(self.tables):
            raise WireError(f"{len(tensors)} tensors instead of {2 + 2 * len(self.tables)}")
        if not math.isfinite(head.rate):
            raise WireError(f"a learning rate of {head.rate}")
        versions = numbers(tensors[0], VERSION, (-1,))
        if versions.min(initial=0) < 0:
            raise WireError("a gradient of parameters before the first")
        dense = read_tensor(tensors[1], self.dense.dtype, (-1,))
        if len(dense) not in (0, len(self.dense)):
            raise WireError(f"{len(dense)} dense numbers instead of {len(self.dense)}")
        tables = []
        for number, (table, rows_body, body) in enumerate(zip(self.tables, tensors[2::2], tensors[3::2], strict=True)):
            rows = self._read_rows(number, rows_body)
            if (np.diff(rows) <= 0).any():
                raise WireError("rows that are not in ascending order, each once")
            tables.append((torch.from_numpy(rows), read_tensor(body, table.dtype, (len(rows), table.shape[1]))))
        return Change(dense if len(dense) else None, tables, head.rate, [(int(version),) for version in versions])

    def read_rows(self, tensors: Sequence[memoryview]) -> list[Array]:
        """The rows of each table that a look-up asks for."""
        if len(tensors) != len(self.tables):
            raise WireError(f"rows of {len(tensors)} tables instead of {len(self.tables)}")
        return [self._read_rows(number, body) for number, body in enumerate(tensors)]

    def read_all(self, tensors: Sequence[memoryview]) -> list[Array]:
        """All parameters off the wire, as ``everything`` gives them."""
        if len(tensors) != len(self.arrays):
            raise WireError(f"{len(tensors)} tensors instead of {len(self.arrays)}")
        return [numbers(body, array.dtype, array.shape) for body, array in zip(tensors, self.arrays, strict=True)]

    def _read_rows(self, number: int, body: memoryview) -> Array:
        rows = read_tensor(body, ROW, (-1,)).numpy()
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self.tables[number])):
            raise WireError(f"a row that table {self.spec.tables[number].name} does not have on server {self.server}")
        return rows


def _readers(spec: Spec) -> int:
    return spec.rules.trainers if spec.rules.mode == "geo_sgd" else 0


def read_tensor(body: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers off the wire. Raises ``WireError`` where they have another size."""
    return torch.from_numpy(np.require(numbers(body, dtype, shape), requirements="W"))  # torch warns of what is read-only
