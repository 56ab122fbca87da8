"""Spec: what trainers tell a server of the model, the optimizer and the rules, as JSON. The server needs nothing else of a script."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from fleetbench.config import Config, decode
from fleetbench.plan.servers.rules import ServerRules, Shards, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(Config):
    """Equal on all trainers of a job."""

    rules: ServerRules
    dense: int
    """Numbers in the dense parameters, in the model's order."""
    tables: tuple[Table, ...]
    dtype: str
    optimizer: str
    options: dict[str, float]
    names: tuple[str, ...] = ()
    """Dense parameters by name, for readers of a checkpoint."""
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
        """What ``to_json`` wrote."""
        return decode(json.loads(text if isinstance(text, str) else bytes(text)), cls, "")


_NAMED = 4
"""Differences that are named; there may be one a parameter."""


def differences(held: Spec, told: Spec, *, model_only: bool) -> str:
    """How a trainer's description differs from what a server holds; empty where it does not.

    ``model_only``: what is held is from a checkpoint, and rules and the optimizer's options may be other ones.
    """
    ours, theirs = (_described(spec, model_only=model_only) for spec in (held, told))
    found = [
        f"{name} ({ours.get(name, 'none')} on the server, {theirs.get(name, 'none')} on the trainer)"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    return "; ".join(found[:_NAMED]) + (f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def _described(spec: Spec, *, model_only: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"dtype": spec.dtype, "optimizer": spec.optimizer, "dense parameters": spec.dense}
    told |= {f"parameter {place}": f"{own[0]} of {own[1]}" for place, own in enumerate(zip(spec.names, spec.sizes, strict=True))}
    told |= {f"embedding {place}": f"{table.name}, {table.rows} x {table.width}" for place, table in enumerate(spec.tables)}
    return told if model_only else told | dataclasses.asdict(spec.rules) | spec.options
