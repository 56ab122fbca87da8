"""State: what a strategy of trainers keeps."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from fleetbench.plan.adaptive_k import Rounds
from fleetbench.plan.loss_scaling import Scale


class State(NamedTuple):
    """A trainer's decisions so far. Plain data: it is saved with a checkpoint.

    A *step* is one forward and backward; an *update* ends one step, or with gradient merge several.
    Both are counted from 1, and warm-up ends at 0. A tuple, because every event of a step makes a
    new state, and making a tuple costs less than making a frozen dataclass.
    """

    first_step: int = 1
    """Number of the first step; below 1 where training warms up."""
    step: int | None = None
    """The step under way or done last; none before the first."""
    in_step: bool = False
    """Between ``StepBegin`` and the step's update or skip."""
    next_id: int = 0
    """Id of the next operation."""
    step_id: int = 0
    """Id of the first operation of the step under way."""
    phase: int = 0
    """Steps since the last update, among those that share one."""
    merged: int = 0
    """Of these, the steps whose gradients are in the sum."""
    origin: int = 0
    """The update before the first."""
    updates: int = 0
    """The last update."""
    last_sync: int | None = None
    """The last update after which trainers agreed; none before the first, unless the first round is whole: ``origin``."""
    fragment: int = 0
    """With fragments: the one that is merged next."""
    flight: int | None = None
    """Id of the first operation of its exchange, where that is under way between steps."""
    agreed: int | None = None
    """With fragments: the last update after which trainers agreed in all of the model; none before the first."""
    epoch: int = 0
    """Epochs that have ended."""
    epoch_ended: bool = False
    """An epoch has ended since trainers last averaged their losses."""
    rounds: Rounds | None = None
    """Adaptive Local SGD: its K, and what K follows."""
    scale: Scale | None = None
    """Mixed precision: the loss scaling."""

    @property
    def next_step(self) -> int:
        """The step that follows."""
        return self.first_step if self.step is None else self.step + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: dataclasses.asdict(value) if isinstance(value, Rounds | Scale) else value for name, value in self._asdict().items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> State:
        """The state that ``to_dict`` wrote."""
        rounds = None if data["rounds"] is None else Rounds(**data["rounds"])
        scale = None if data["scale"] is None else Scale(**data["scale"])
        return cls(**{**data, "rounds": rounds, "scale": scale})


def closed_round(before: State, after: State) -> int | None:
    """Updates of the round that is closed after an event; none where the event closed none."""
    if after.last_sync != after.updates or before.last_sync == after.last_sync:
        return None
    return after.updates - (before.origin if before.last_sync is None else before.last_sync)
