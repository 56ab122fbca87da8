"""Spec: what trainers tell a server of the model, the optimizer and the rules, as JSON. The server needs nothing else of a script."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from fleetbench.plan.servers.rules import Mode, ServerRules
from fleetbench.plan.servers.shards import Shards, Table
from real.servers.wire import MAX_TENSORS, read_json, reading

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
_MOST = 2**40
"""Above any count that somebody means."""
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
    switches = (rules.independent_receive, rules.has_dense)
    others = ("mode", "idle_ns", "independent_receive", "has_dense")
    counts = [value for name, value in dataclasses.asdict(rules).items() if name not in others]
    counts += [spec.dense, *spec.sizes, *(number for table in spec.tables for number in (table.rows, table.width))]
    if not all(type(number) is int and 0 <= number < _MOST for number in counts) or min(rules.trainers, rules.servers) < 1:
        raise ValueError("a size that is none")
    if type(rules.idle_ns) is not int or not 0 <= rules.idle_ns < 2**63 or not all(type(switch) is bool for switch in switches):
        raise ValueError("a time or a switch that is none")
    if 2 + 2 * len(spec.tables) > MAX_TENSORS or any(table.rows >= 2**31 or table.rows * table.width >= _MOST for table in spec.tables):
        raise ValueError("more tables than fit into a push, or one of 2^31 rows, or of 2^40 numbers, or more")
    names = [*spec.names, *(table.name for table in spec.tables)]
    if not all(type(name) is str for name in names) or len(spec.names) != len(spec.sizes) or (spec.sizes and sum(spec.sizes) != spec.dense):
        raise ValueError("names or sizes that do not fit the parameters")
    if rules.mode not in get_args(Mode) or spec.dtype not in DTYPES or spec.optimizer not in OPTIONS:
        raise ValueError("a mode, type or optimizer that is not known")
    if set(spec.options) != set(OPTIONS[spec.optimizer]):
        raise ValueError("options of another optimizer")
    if wrong := [name for name, value in spec.options.items() if not 0 <= value < (1 if name.startswith("beta") else math.inf)]:
        raise ValueError(f"{wrong[0]} = {spec.options[wrong[0]]}, as no optimizer has it")
    return spec


_NAMED = 4
"""Differences that are named; there may be one a parameter."""
_FIELDS_OF_RULES = {
    "max_merge": "max_merge_var_num",
    "queue_size": "send_queue_size",
    "pushes_in_flight": "thread_pool_size",
    "idle_ns": "send_wait_times",
    "independent_receive": "independent_recv_thread",
    "sends_before_receive": "min_send_grad_num_before_recv",
    "has_dense": "dense parameters",
}
"""What users call them, where that is another name."""


def differences(held: Spec | None, told: Spec, trainers: int, servers: int, *, model_only: bool) -> str:
    """How a trainer's description does not fit a server of so many trainers and servers that holds a part of ``held``; empty where it fits.

    ``model_only``: what is held is from a checkpoint, and rules and the optimizer's options may be other ones.
    """
    if (told.rules.trainers, told.rules.servers) != (trainers, servers):
        theirs = f"{told.rules.trainers} and {told.rules.servers}"
        return f"trainers and servers ({trainers} and {servers} on the server, {theirs} on the trainer)"
    if held is None:
        return ""
    found = _different(_model_of(held), _model_of(told))
    if not found and (held.names, held.tables) != (told.names, told.tables):
        found = ["the order of the parameters"]
    if not found and not model_only:
        found = _different(_rules_of(held), _rules_of(told))
    return "; ".join(found[:_NAMED]) + (f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def _different(held: dict[str, object], told: dict[str, object]) -> list[str]:
    return [
        f"{name} ({held.get(name, 'none')} on the server, {told.get(name, 'none')} on the trainer)"
        for name in dict.fromkeys((*held, *told))
        if held.get(name) != told.get(name)
    ]


def _model_of(spec: Spec) -> dict[str, object]:
    told: dict[str, object] = {"dtype": spec.dtype, "optimizer": spec.optimizer, "dense parameters": spec.dense}
    told |= {f"parameter {name}": size for name, size in zip(spec.names, spec.sizes, strict=True)}
    return told | {f"embedding {table.name}": f"{table.rows} x {table.width}" for table in spec.tables}


def _rules_of(spec: Spec) -> dict[str, object]:
    return {_FIELDS_OF_RULES.get(name, name): value for name, value in dataclasses.asdict(spec.rules).items()} | spec.options
