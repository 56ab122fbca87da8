"""Spec: what trainers tell a server of the model, the optimizer and the rules, as JSON. The server needs nothing else of a script."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.shards import Shards, Table
from real.servers.wire import MAX_TENSORS, read_json, reading

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
_MOST = 2**40
"""Above any count that somebody means."""
_MODES = ("synchronous", "asynchronous", "geo_sgd")
OPTIONS: dict[str, dict[str, float]] = {
    "sgd": {"weight_decay": 0.0},
    "momentum": {"momentum": 0.9, "nesterov": 0.0, "weight_decay": 0.0},
    "adagrad": {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "sparse_adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
}
"""Optimizers of a server, their options and torch's defaults. The learning rate comes with every gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Equal on all trainers of a job."""

    rules: ServerRules
    dense: int
    """Numbers in the dense parameters, in the model's order."""
    tables: tuple[Table, ...]
    dtype: str
    optimizer: str
    options: dict[str, float]
    names: tuple[str, ...] = ()
    """Dense parameters by name, for whoever reads a checkpoint."""
    sizes: tuple[int, ...] = ()
    """Their numbers of elements."""

    @property
    def shards(self) -> Shards:
        """Who holds what."""
        return Shards(servers=self.rules.servers, dense=self.dense, tables=self.tables)

    def to_json(self) -> bytes:
        """For the wire, and for checkpoints."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes | memoryview | str) -> Spec:
        """What ``to_json`` wrote. Raises ``WireError`` for anything else."""
        with reading("no description of a model"):
            return _checked(cls(**_fields(read_json(text))))


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    return {
        **data,
        "rules": ServerRules(**data["rules"]),
        "tables": tuple(Table(**table) for table in data["tables"]),
        "names": tuple(data["names"]),
        "sizes": tuple(data["sizes"]),
        "options": {name: float(value) for name, value in data["options"].items()},
    }


def _checked(spec: Spec) -> Spec:
    rules = spec.rules
    whole = [
        rules.trainers,
        rules.servers,
        rules.k_steps,
        rules.max_merge,
        rules.queue_size,
        rules.pushes_in_flight,
        rules.sends_before_receive,
        spec.dense,
        *spec.sizes,
    ]
    whole += [number for table in spec.tables for number in (table.rows, table.width)]
    if not all(type(number) is int and 0 <= number < _MOST for number in whole) or min(rules.trainers, rules.servers) < 1:
        raise ValueError("a size that is none")
    if type(rules.idle_ns) is not int or not 0 <= rules.idle_ns < 2**63:
        raise ValueError("a time that is none")
    if 2 + 2 * len(spec.tables) > MAX_TENSORS or any(table.rows >= 2**31 or table.rows * table.width >= _MOST for table in spec.tables):
        raise ValueError("more tables than fit into a push, or one of 2^31 rows, or of 2^40 numbers, or more")
    if not all(type(switch) is bool for switch in (rules.independent_receive, rules.has_dense)):
        raise ValueError("a switch that is none")
    names = [*spec.names, *(table.name for table in spec.tables)]
    if not all(type(name) is str for name in names) or len(spec.names) != len(spec.sizes) or (spec.sizes and sum(spec.sizes) != spec.dense):
        raise ValueError("names or sizes that do not fit the parameters")
    if rules.mode not in _MODES or spec.dtype not in DTYPES or spec.optimizer not in OPTIONS:
        raise ValueError("a mode, type or optimizer that is not known")
    if set(spec.options) != set(OPTIONS[spec.optimizer]):
        raise ValueError("options of another optimizer")
    if wrong := [name for name, value in spec.options.items() if not 0 <= value < (1 if name.startswith("beta") else math.inf)]:
        raise ValueError(f"{wrong[0]} = {spec.options[wrong[0]]}, as no optimizer has it")
    return spec
