"""Elastic local steps: what changes for a worker when others come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fleetbench.plan.operations import Operations
from fleetbench.plan.state import State
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


class Progress(NamedTuple):
    """A worker's progress: numbers of steps that have begun, and of updates and epochs that have ended."""

    step: int
    updates: int
    epoch: int


def joining(average: Operations) -> Operations:
    """Return what a newcomer runs of an ``average`` between steps: it has no optimizer yet whose state could be reset."""
    return tuple(operation for operation in average if operation.kind != "reset")


def joined(state: State, told: Progress) -> State:
    """Return a newcomer's state once it has taken a peer's progress: its first round begins there."""
    return state._replace(step=told.step or None, updates=told.updates, last_sync=told.updates, epoch=told.epoch)
