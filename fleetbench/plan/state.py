"""State: what a strategy of trainers remembers."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from fleetbench.plan.adaptive_k import Rounds
from fleetbench.plan.loss_scaling import Scale


class State(NamedTuple):
    """A trainer's decisions so far. Plain data that is saved with a checkpoint.

    A *step* is one forward and backward; an *update* ends one step, or with gradient merge several. Both are
    counted from 1, and warm-up ends at 0. It is a tuple because every event of a step creates a new state,
    and a tuple is cheaper than a frozen dataclass.
    """

    first_step: int = 1
    """Number of the first step; below 1 if training warms up."""
    step: int | None = None
    """Number of the current or last step; none before the first."""
    in_step: bool = False
    """Whether the state is between ``StepBegin`` and the step's update or skip."""
    next_id: int = 0
    """Id of the next operation."""
    step_id: int = 0
    """Id of the first operation of the current step."""
    phase: int = 0
    """Number of steps since the last update, among those that share one."""
    merged: int = 0
    """Number of these steps whose gradients are in the sum."""
    origin: int = 0
    """Number of the update before the first."""
    updates: int = 0
    """Number of the last update."""
    last_sync: int | None = None
    """Number of the last update after which trainers agreed; none before the first, unless the first round is
    whole: ``origin``."""
    fragment: int = 0
    """Fragment that is merged next."""
    flight: int | None = None
    """Id of the first operation of its exchange, if that is running between steps."""
    agreed: int | None = None
    """With fragments: number of the last update after which trainers agreed on the whole model; none before
    the first."""
    epoch: int = 0
    """Number of epochs that have ended."""
    epoch_ended: bool = False
    """Whether an epoch has ended since trainers last averaged their losses."""
    rounds: Rounds | None = None
    """State of adaptive Local SGD: its K, and what K follows."""
    scale: Scale | None = None
    """State of the loss scaling."""

    @property
    def next_step(self) -> int:
        """Number of the next step."""
        return self.first_step if self.step is None else self.step + 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {name: dataclasses.asdict(value) if isinstance(value, Rounds | Scale) else value for name, value in self._asdict().items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> State:
        """Read the state that ``to_dict`` wrote."""
        rounds = None if data["rounds"] is None else Rounds(**data["rounds"])
        scale = None if data["scale"] is None else Scale(**data["scale"])
        return cls(**{**data, "rounds": rounds, "scale": scale})


def closed_round(before: State, after: State) -> int | None:
    """Return the number of updates in the round that an event ended; none if it ended none."""
    if after.last_sync != after.updates or before.last_sync == after.last_sync:
        return None
    return after.updates - (before.origin if before.last_sync is None else before.last_sync)
