"""Shard: what one server holds, and what it does with pushes and pulls. No sockets, and no decisions.

The optimizer is torch's, on the part of the dense parameters and on the pushed rows of the tables. Rows that a push does not hold
keep their parameters and their state (torch calls this lazy): for SGD and Adagrad that is the dense update with zeros in them, for
momentum and Adam it is not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from real.servers.spec import DTYPES, Spec
from real.servers.wire import Head, WireError, numbers

Array = np.ndarray[Any, np.dtype[Any]]

ROW = np.dtype(np.int32)
"""Rows on the wire: their number on the server, which is the row divided by the number of servers."""
VERSION = np.dtype(np.int64)


SLOTS: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sparse_adam": ("exp_avg", "exp_avg_sq"),
}
"""Names of the arrays of state that each parameter has."""


class Updates:
    """One optimizer over a list of arrays, each with the state that it keeps for it. ``name`` is a key of ``SLOTS``."""

    def __init__(self, name: str, options: Mapping[str, float], arrays: Sequence[Array]) -> None:
        self.options = options
        self._name = name
        self._arrays = arrays
        start = options.get("initial_accumulator_value", 0.0)
        self.state: list[dict[str, Array]] = [{slot: np.full_like(array, start) for slot in SLOTS[name]} for array in arrays]
        self.steps = [0] * len(arrays)
        """Updates that each has seen."""

    def update(self, number: int, gradient: Array, rate: float, rows: Array | None = None) -> None:
        """One step of array ``number``, or of distinct ``rows`` of it.

        A step without rows counts: the whole table has made it, on other servers.
        """
        self.steps[number] += 1
        if not len(gradient):
            return
        held = [self._arrays[number], *self.state[number].values()]
        parts = held if rows is None else [array[rows] for array in held]
        self._step(*map(torch.from_numpy, (gradient, *parts)), step=self.steps[number], rate=rate)
        for array, part in zip(held, parts, strict=True) if rows is not None else ():
            array[rows] = part

    def _step(self, gradient: torch.Tensor, parameter: torch.Tensor, *state: torch.Tensor, step: int, rate: float) -> None:
        options: dict[str, Any] = {"lr": rate, "foreach": False, "fused": True, "maximize": False, **self.options}
        before = torch.tensor(step - 1, dtype=torch.float64)  # which counts beyond 2^24
        if self._name in ("sgd", "momentum"):
            options = {"momentum": 0.0, **options, "nesterov": bool(options.get("nesterov"))}
            sgd([parameter], [gradient], [state[0] if state else None], dampening=0.0, **options)
        elif self._name == "adagrad":
            del options["initial_accumulator_value"]
            adagrad([parameter], [gradient], [state[0]], [before], **options)
        else:
            if self._name == "sparse_adam":  # which adds eps before the correction
                options["eps"] /= math.sqrt(1 - options["beta2"] ** step)
            adam([parameter], [gradient], [state[0]], [state[1]], [], [before], amsgrad=False, **options)


@dataclass(slots=True)
class Change:
    """A gradient, a delta, or parameters, of a whole model or of a server's part: dense numbers, and distinct rows of each table."""

    dense: torch.Tensor | None
    tables: list[tuple[torch.Tensor, torch.Tensor]]
    """Rows and their values; of a server's part as the server numbers them, in ascending order."""
    rate: float = 0.0
    versions: list[tuple[int, ...]] = field(default_factory=list)
    """Of each gradient in it, by server: updates in what it was computed from; of a server's part, its own alone."""


def add_changes(changes: Sequence[Change]) -> Change:
    """Their sum, added in their order, with the learning rate of the last."""
    if len(changes) == 1:
        return changes[0]
    dense = [change.dense for change in changes if change.dense is not None]
    tables = [add_rows(parts) for parts in zip(*(change.tables for change in changes), strict=True)]
    versions = [version for change in changes for version in change.versions]
    return Change(functools.reduce(torch.add, dense) if dense else None, tables, changes[-1].rate, versions)


class Shard:
    """Part ``server`` of a model's parameters, with its optimizer's state. Raises ``WireError`` for what does not fit it."""

    def __init__(self, spec: Spec, server: int) -> None:
        self.spec = spec
        self.server = server
        dtype = DTYPES[spec.dtype]
        begin, end = spec.shards.dense_range(server)
        self._sent: dict[int, tuple[Array, ...]] = {}
        try:
            self.dense: Array = np.zeros(end - begin, dtype)
            self.tables: list[Array] = [
                np.zeros((spec.shards.num_rows(number, server), table.width), dtype) for number, table in enumerate(spec.tables)
            ]
            self.optimizer = Updates(spec.optimizer, spec.options, self.arrays)
            self._changed = self._flags(changed=False)
        except (MemoryError, ValueError) as error:  # numpy's words for what does not fit into memory, or into a size
            raise WireError(f"a model for which server {server} has no memory: {error}") from error

    def adopt(self, spec: Spec) -> None:
        """Go on from a checkpoint with the rules and options of ``spec``, of this model and optimizer; no trainer has seen anything yet."""
        self.spec, self.optimizer.options, self._sent = spec, spec.options, {}
        self._changed = self._flags(changed=True)

    def _flags(self, *, changed: bool) -> list[list[Array]]:
        """In GeoSGD, for each trainer, which rows of each table others have changed."""
        rules = self.spec.rules
        num = rules.trainers if rules.mode == "geo_sgd" else 0
        return [[np.full(len(table), changed) for table in self.tables] for _ in range(num)]

    @property
    def arrays(self) -> list[Array]:
        """Dense parameters, then the tables."""
        return [self.dense, *self.tables]

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

    def install(self, parameters: Sequence[Array]) -> None:
        """Overwrite all parameters."""
        for array, values in zip(self.arrays, parameters, strict=True):
            array[...] = values

    def update(self, pushes: Sequence[Change], divisor: int) -> None:
        """The optimizer's step by the sum of the pushes, added in their order, over ``divisor``."""
        change = add_changes(pushes)
        if change.dense is not None:
            self.optimizer.update(0, _divided(change.dense, divisor), change.rate)
        for number, (rows, values) in enumerate(change.tables, 1):
            self.optimizer.update(number, _divided(values, divisor), change.rate, rows.numpy())

    def accumulate(self, push: Change) -> None:
        """Add a delta."""
        if push.dense is not None:
            self.dense += push.dense.numpy()
        for table, (rows, values) in zip(self.tables, push.tables, strict=True):
            table[rows.numpy()] += values.numpy()

    def mark(self, rank: int, push: Change) -> None:
        """The rows of ``rank``'s push have changed for all other trainers."""
        for other, changed in enumerate(self._changed):
            if other != rank:
                for flags, (rows, _) in zip(changed, push.tables, strict=True):
                    flags[rows.numpy()] = True

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
        changed = zip(self._sent[rank], self.tables, strict=True)
        return [self.dense.copy(), *(part for rows, table in changed for part in (rows, table[rows]))]

    def look_up(self, rows: Sequence[Array]) -> list[Array]:
        """The values of each table's rows."""
        return [table[own] for table, own in zip(self.tables, rows, strict=True)]

    def everything(self, rank: int) -> list[Array]:
        """All there is: dense numbers, then the tables. What had changed for ``rank`` is no news any more."""
        if self._changed:
            for flags in self._changed[rank]:
                flags[:] = False
        return [array.copy() for array in self.arrays]

    def _read_rows(self, number: int, body: memoryview) -> Array:
        rows = read_tensor(body, ROW, (-1,)).numpy()
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self.tables[number])):
            raise WireError(f"a row that table {self.spec.tables[number].name} does not have on server {self.server}")
        return rows


def _divided(values: torch.Tensor, divisor: int) -> Array:
    return values.numpy() if divisor == 1 else (values / divisor).numpy()


def read_tensor(body: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers off the wire. Raises ``WireError`` where they have another size."""
    return torch.from_numpy(np.require(numbers(body, dtype, shape), requirements="W"))  # torch warns of what is read-only


def add_rows(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of sparse tensors, each of distinct rows: distinct rows in ascending order, and their sums, added in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    rows, where = torch.unique(torch.cat([own for own, _ in parts]), return_inverse=True)
    added = torch.cat([values for _, values in parts])
    return rows, torch.zeros(len(rows), *added.shape[1:], dtype=added.dtype).index_add_(0, where, added)
