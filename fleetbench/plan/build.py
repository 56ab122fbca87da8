"""Plan: the static part of what a strategy decides, made once and the same on every rank."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleetbench.plan.exchange import lay_out
from fleetbench.plan.fusion import Bucket, fuse
from fleetbench.plan.layers import Gradient
from fleetbench.plan.operations import Operation, Operations
from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Buckets in order of readiness and the operations of one exchange."""

    trainers: int
    buckets: tuple[Bucket, ...]
    exchange: Operations
    """Ids count from 0; a strategy shifts them to its own."""
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    """Names of process groups with their ranks."""
    gates: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Layers whose next forward waits for their buckets only; empty: every layer waits for the update."""

    @functools.cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits over all of the plan; equal plans run the same operations."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    @functools.cached_property
    def of_bucket(self) -> dict[int, Operations]:
        """The exchange's operations by bucket."""
        found: dict[int, list[Operation]] = {}
        for operation in self.exchange:
            assert operation.bucket is not None
            found.setdefault(operation.bucket, []).append(operation)
        return {bucket: tuple(operations) for bucket, operations in found.items()}

    @functools.cached_property
    def leaves(self) -> tuple[int, ...]:
        """Relative ids of the operations that no other waits for."""
        waited = {other for operation in self.exchange for other in operation.after}
        return tuple(operation.id for operation in self.exchange if operation.id not in waited)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for ``plan.json``."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]  # tuples become lists

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that ``to_dict`` wrote."""
        return cls(
            trainers=data["trainers"],
            buckets=tuple(Bucket(**{**item, "gradients": tuple(item["gradients"])}) for item in data["buckets"]),
            exchange=tuple(Operation(**{**item, "after": tuple(item["after"])}) for item in data["exchange"]),
            groups=tuple((name, tuple(ranks)) for name, ranks in data["groups"]),
            gates=tuple((layer, tuple(buckets)) for layer, buckets in data["gates"]),
        )


def build_plan(strategy: DistributedStrategy, gradients: Sequence[Gradient], trainers: int) -> Plan:
    """Plan the exchange of ``gradients``, given in order of readiness, among ``trainers``."""
    buckets = fuse(gradients, strategy)
    return Plan(
        trainers=trainers,
        buckets=buckets,
        exchange=lay_out(buckets, strategy, trainers),
        groups=(("world", tuple(range(trainers))),),
    )
