"""Elastic local steps: what changes for a worker when others come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """Rule for the inner learning rate. An undisturbed training has all its workers, and is plain Local SGD."""

    lr: Literal["constant", "sqrt", "linear"]

    @classmethod
    def of(cls, strategy: DistributedStrategy) -> Elastic | None:
        """Return the rule of a strategy with elastic local steps; None for any other."""
        return cls(lr=strategy.localsgd_configs.elastic_lr) if strategy.is_elastic else None

    def lr_factor(self, present: int, nominal: int) -> float:
        """Return the factor on the learning rate while ``present`` of ``nominal`` workers are there."""
        return float((present / nominal) ** {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}[self.lr])
