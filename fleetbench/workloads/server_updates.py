"""Updates on parameter servers: computation on a server's shard, and on a trainer's copy in GeoSGD.

This module has no sockets and decides nothing; ``fleetbench.plan.servers`` has the decisions. Real and
virtual servers and trainers use it.

The optimizer is torch's, applied to the server's part of the dense parameters and to the pushed rows of the
tables. Rows that a push does not contain keep their parameters and their state (torch calls this lazy). For
SGD and Adagrad this equals the dense update with zeros in those rows; for momentum and Adam it does not.
"""

import functools
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fleetbench.plan.servers.rules import Shards, Table
from fleetbench.workload import OPTIMIZER_STATE, Workload

Array = np.ndarray[Any, np.dtype[Any]]
Told = tuple[str, dict[str, float]]
"""Name and options of an optimizer, with the keys of ``OPTIONS``."""

ROW = np.dtype(np.int32)
"""Type of row numbers in messages. A row's number on its server is its number in the table divided by the
number of servers."""

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
OPTIONS: dict[str, dict[str, float]] = {
    "sgd": {"weight_decay": 0.0},
    "momentum": {"momentum": 0.9, "nesterov": 0.0, "weight_decay": 0.0},
    "adagrad": {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "sparse_adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
}
"""Options of each optimizer of a server, with torch's defaults. The learning rate comes with every gradient
instead."""

SLOTS = {**OPTIMIZER_STATE, "sparse_adam": OPTIMIZER_STATE["adam"]}
"""Names of the optimizer's state arrays per parameter, by optimizer."""


class Updates:
    """One optimizer over a list of arrays, with its state for each array. ``name`` is a key of ``SLOTS``."""

    def __init__(self, name: str, options: Mapping[str, float], arrays: Sequence[Array]) -> None:
        self.options = options
        self._name = name
        self._arrays = arrays
        start = options.get("initial_accumulator_value", 0.0)
        self.state: list[dict[str, Array]] = [{slot: np.full_like(array, start) for slot in SLOTS[name]} for array in arrays]
        self.steps = [0] * len(arrays)
        """Number of updates of each array so far."""

    def update(self, number: int, gradient: Array, rate: float, rows: Array | None = None) -> None:
        """Update array ``number`` in place or, with ``rows``, only these distinct rows of it.

        An empty gradient also counts as an update, because other servers update the rest of the table.
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
        before = torch.tensor(step - 1, dtype=torch.float64, device="cpu")  # float64, because float32 counts only to 2^24
        if self._name in ("sgd", "momentum"):
            options = {"momentum": 0.0, **options, "nesterov": bool(options.get("nesterov"))}
            sgd([parameter], [gradient], [state[0] if state else None], dampening=0.0, **options)
        elif self._name == "adagrad":
            del options["initial_accumulator_value"]
            adagrad([parameter], [gradient], [state[0]], [before], **options)
        else:
            if self._name == "sparse_adam":  # SparseAdam adds eps before the bias correction
                options["eps"] /= math.sqrt(1 - options["beta2"] ** step)
            adam([parameter], [gradient], [state[0]], [state[1]], [], [before], amsgrad=False, **options)


@dataclass(slots=True)
class Change:
    """A gradient, a delta, or parameters, of a whole model or of a server's part.

    It holds dense numbers, and distinct rows of each table.
    """

    dense: torch.Tensor | None
    """Dense numbers as one vector, or None if the model has none."""
    tables: list[tuple[torch.Tensor, torch.Tensor]]
    """Rows and their values, for each table. In a server's part, rows are numbered as on the server, in
    ascending order."""
    rate: float = 0.0
    """Learning rate for the gradient."""
    versions: Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """Number of server updates in the parameters from which each gradient was computed, ``(gradients,
    servers)``, in a server's part ``(gradients,)``."""


def add_changes(changes: Sequence[Change]) -> Change:
    """Return the sum of ``changes``, added in order, with the learning rate of the last one."""
    if len(changes) == 1:
        return changes[0]
    dense = [change.dense for change in changes if change.dense is not None]
    tables = [add_rows(parts) for parts in zip(*(change.tables for change in changes), strict=True)]
    versions = np.concatenate([change.versions for change in changes])
    return Change(functools.reduce(torch.add, dense) if dense else None, tables, changes[-1].rate, versions)


class Layout:
    """A model's trained parameters: dense ones as one vector, and tables with sparse gradients."""

    def __init__(self, named: Mapping[str, torch.Tensor], sparse: Collection[str]) -> None:
        self.named = named
        self.dense = {name: value for name, value in named.items() if name not in sparse}
        self.sparse = {name: value for name, value in named.items() if name in sparse}
        none = next(iter(named.values())).new_zeros(0)
        self.flat = torch.cat([none, *(value.detach().reshape(-1) for value in self.dense.values())])
        """Copy of all dense parameters in one 1-D tensor, in the order of ``dense``."""
        self.tables = [value.data for value in self.sparse.values()]

    def table_of(self, weight: torch.Tensor) -> int:
        """Return the index of the table with this weight."""
        return next(number for number, table in enumerate(self.sparse.values()) if table is weight)

    def shards(self, servers: int) -> Shards:
        """Return the distribution of the parameters over ``servers`` servers."""
        tables = tuple(Table(name=name, rows=len(value), width=value.shape[1]) for name, value in self.sparse.items())
        return Shards(servers=servers, dense=len(self.flat), tables=tables)

    def parameters(self, flat: torch.Tensor, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all parameters in the model's order, dense ones as views."""
        pieces = flat.split([value.numel() for value in self.dense.values()]) if self.dense else ()
        own = {name: piece.view_as(self.dense[name]) for name, piece in zip(self.dense, pieces, strict=True)}
        own |= zip(self.sparse, tables, strict=True)
        return [own[name] for name in self.named]

    def change(self, gradients: Sequence[torch.Tensor | None]) -> Change:
        """Return a copy of a step's gradients.

        Parameters that the loss does not use get zeros or, in tables, no rows.
        """
        found = dict(zip(self.named, gradients, strict=True))
        dense = [torch.zeros_like(value) if (own := found[name]) is None else own for name, value in self.dense.items()]
        tables = []
        for name, table in self.sparse.items():
            own = found[name]
            whole = None if own is None else own.clone() if own.is_coalesced() else own.coalesce()  # coalescing copies, too
            none = table.new_zeros(0, dtype=torch.int64), table.new_zeros(0, table.shape[1])
            tables.append(none if whole is None else (whole.indices()[0], whole.values()))
        return Change(torch.cat([own.detach().reshape(-1) for own in dense]) if dense else None, tables)

    def touched(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the rows of each table in a step's gradients, possibly with duplicates."""
        found = dict(zip(self.named, gradients, strict=True))
        return [None if (own := found[name]) is None else own._indices()[0] for name in self.sparse]  # noqa: SLF001  # `indices` sorts them first


class ParameterShard:
    """Part of a model's parameters on one ``server``, with its optimizer's state.

    ``readers`` is the number of trainers in GeoSGD, which pull the rows that others changed, and 0 in other
    modes.
    """

    def __init__(self, shards: Shards, server: int, dtype: np.dtype[Any], told: Told, readers: int = 0) -> None:
        self.server = server
        self.dense: Array = np.zeros(len(range(shards.dense)[shards.dense_part(server)]), dtype)
        self.tables: list[Array] = [
            np.zeros((shards.num_rows(number, server), table.width), dtype) for number, table in enumerate(shards.tables)
        ]
        self.optimizer = Updates(*told, self.arrays)
        self._changed = self._flags(readers)

    def _flags(self, readers: int) -> list[list[Array]]:
        """Return flags by reader and table, one per row: whether other trainers have changed the row."""
        return [[np.zeros(len(table), np.bool_) for table in self.tables] for _ in range(readers)]

    @property
    def arrays(self) -> list[Array]:
        """Dense parameters, then the tables."""
        return [self.dense, *self.tables]

    def install(self, parameters: Sequence[Array]) -> None:
        """Overwrite all parameters."""
        for array, values in zip(self.arrays, parameters, strict=True):
            array[...] = values

    def update(self, pushes: Sequence[Change], divisor: int) -> None:
        """Update by the sum of ``pushes``, added in order, divided by ``divisor``."""
        change = add_changes(pushes)
        if change.dense is not None:
            self.optimizer.update(0, _divided(change.dense, divisor), change.rate)
        for number, (rows, values) in enumerate(change.tables, 1):
            self.optimizer.update(number, _divided(values, divisor), change.rate, rows.numpy())

    def accumulate(self, push: Change) -> None:
        """Add the delta of ``push`` to the parameters."""
        if push.dense is not None:
            self.dense += push.dense.numpy()
        for table, (rows, values) in zip(self.tables, push.tables, strict=True):
            table[rows.numpy()] += values.numpy()

    def mark(self, rank: int, push: Change) -> None:
        """Mark the rows of ``rank``'s push as changed for all other trainers."""
        for other, changed in enumerate(self._changed):
            if other != rank:
                for flags, (rows, _) in zip(changed, push.tables, strict=True):
                    flags[rows.numpy()] = True

    def parameters(self, rank: int) -> list[Array]:
        """Return the answer to a pull of ``rank``: dense numbers, then each table's changed rows and their values."""
        found = [self.dense.copy()]
        for flags, table in zip(self._changed[rank] if self._changed else (), self.tables, strict=False):
            rows = np.flatnonzero(flags).astype(ROW)
            flags[:] = False
            found += [rows, table[rows]]
        return found

    def look_up(self, rows: Sequence[Array]) -> list[Array]:
        """Return the values of each table's rows."""
        return [table[own] for table, own in zip(self.tables, rows, strict=True)]


def views_of(shards: Shards, server: int, flat: torch.Tensor, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a server's parts of a model: of the dense numbers, then of each table."""
    return [flat[shards.dense_part(server)], *(table[server :: shards.servers] for table in tables)]


def _divided(values: torch.Tensor, divisor: int) -> Array:
    return values.numpy() if divisor == 1 else (values / divisor).numpy()


def add_rows(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of sparse tensors with distinct rows: rows in ascending order, and sums in the parts' order."""
    if len(parts) == 1:
        return parts[0]
    rows, where = torch.unique(torch.cat([own for own, _ in parts]), return_inverse=True)
    added = torch.cat([values for _, values in parts])
    return rows, added.new_zeros(len(rows), *added.shape[1:]).index_add_(0, where, added)


def options_for(workload: Workload) -> Told:
    """Return the name and options of an experiment's optimizer from its file, without an optimizer object."""
    options = {**OPTIONS[workload.optimizer], "weight_decay": workload.weight_decay}
    if "momentum" in options:
        options["momentum"] = workload.momentum
    return workload.optimizer, options


def part_of(change: Change, shards: Shards, server: int) -> Change:
    """Return the part of a change that a server holds, with the server's row numbers."""
    tables = []
    for rows, values in change.tables:
        own, where = _rows_of(rows, shards.servers, server)
        tables.append((torch.from_numpy(own), values if where is None else values.index_select(0, where)))
    dense = None if change.dense is None else change.dense[shards.dense_part(server)]
    return Change(dense, tables, change.rate, change.versions[:, server : server + 1].reshape(-1))


def shard_rows(rows: torch.Tensor, servers: int, server: int) -> tuple[Array, torch.Tensor]:
    """Return those of ``rows`` that a server holds: their numbers on the server, and their numbers in the table."""
    own, where = _rows_of(rows, servers, server)
    return own, rows if where is None else rows.index_select(0, where)


def _rows_of(rows: torch.Tensor, servers: int, server: int) -> tuple[Array, torch.Tensor | None]:
    if servers == 1:
        return rows.to(torch.int32).numpy(), None
    where = (rows % servers == server).nonzero()[:, 0]
    return (rows.index_select(0, where) // servers).to(torch.int32).numpy(), where


class GeoCopy:
    """A trainer's copy in GeoSGD: its model (``latest``), the servers' last state (``old``), and touched rows.

    ``latest`` changes all the time. If a row is read during an update, the delta contains a part of the
    update; the rest remains in latest - old, and is sent later. Only a merge must not coincide with an update:
    both hold ``guard``.
    """

    def __init__(self, flat: torch.Tensor, tables: Sequence[torch.Tensor], shards: Shards) -> None:
        """Create the copy with ``flat`` and ``tables`` as ``latest``, which others change in place."""
        self.guard = threading.Lock()
        self._flat, self._tables = flat, tables
        self._shards = shards
        self._old_dense = flat.clone()
        self._old = [table.clone() for table in tables]
        self._touched = [table.new_zeros(len(table), dtype=torch.bool) for table in tables]

    def mark(self, rows: Sequence[torch.Tensor | None]) -> None:
        """Mark the rows of each table that the step has touched."""
        with self.guard:
            for flags, own in zip(self._touched, rows, strict=True):
                if own is not None:
                    flags.index_fill_(0, own, value=True)

    def take(self, divisor: int) -> Change:
        """Return delta = (latest - old) / divisor for the touched rows and all dense parameters.

        Adds delta to ``old``.
        """
        with self.guard:
            touched = [flags.nonzero()[:, 0] for flags in self._touched]
            for flags in self._touched:
                flags.zero_()
        tables = []
        for table, old, rows in zip(self._tables, self._old, touched, strict=True):
            before = old.index_select(0, rows)
            delta = table.index_select(0, rows).sub_(before).div_(divisor)
            old.index_copy_(0, rows, before.add_(delta))
            tables.append((rows, delta))
        dense = None
        if len(self._old_dense):
            dense = (self._flat - self._old_dense).div_(divisor)
            self._old_dense += dense
        return Change(dense, tables)

    def give_up(self) -> None:
        """Set latest = old everywhere.

        After an exchange this is the servers' state without later pushes of other trainers.
        """
        with self.guard:
            self._flat.copy_(self._old_dense)
            for table, old in zip(self._tables, self._old, strict=True):
                table.copy_(old)

    def merge(self, server: int, dense: torch.Tensor, tables: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Merge a pull from one server, with its row numbers: latest += server - old; old = server."""
        part = self._shards.dense_part(server)
        with self.guard:
            self._flat[part].add_(dense - self._old_dense[part])
            self._old_dense[part] = dense
            for table, old, (rows, values) in zip(self._tables, self._old, tables, strict=True):
                own = rows.to(torch.int64) * self._shards.servers + server
                table.index_add_(0, own, values - old.index_select(0, own))
                old.index_copy_(0, own, values)
