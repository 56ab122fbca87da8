"""State: what a strategy remembers about a trainer."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from fleetbench.plan.adaptive_k import Rounds
from fleetbench.plan.loss_scaling import Scale


class State(NamedTuple):
    """A trainer's counters and decisions so far, as plain data that a checkpoint saves.

    A *step* is one forward and backward. An *update* ends a step or, with gradient merge, several steps. Both
    are numbered from 1; those of a warm-up have numbers up to 0. ``State`` is a tuple because every event of a
    step creates a new one, and a tuple is cheaper than a frozen dataclass.
    """

    first_step: int = 1
    """Number of the first step; below 1 if training warms up."""
    step: int | None = None
    """Number of the current or last step; None before the first."""
    in_step: bool = False
    """Whether the state is between ``StepBegin`` and the step's update or skip."""
    next_id: int = 0
    """Id of the next operation."""
    step_id: int = 0
    """Id of the first operation of the current step."""
    phase: int = 0
    """Number of steps since the last update, if several steps share one."""
    merged: int = 0
    """Number of steps since the last update whose gradients are in the sum."""
    origin: int = 0
    """Number of the update before this state's first; 0 for a new training without warm-up."""
    updates: int = 0
    """Number of the last update."""
    last_sync: int | None = None
    """Number of the last update after which trainers agreed, with fragments on at least one of them. None
    before that; equal to ``origin`` if the first round must be a whole one."""
    fragment: int = 0
    """Index of the fragment that is merged next."""
    flight: int | None = None
    """Id of the first operation of the exchange of ``fragment``, if it is running between steps."""
    agreed: int | None = None
    """Number of the last update after which trainers with fragments agreed on the whole model; None before
    the first."""
    epoch: int = 0
    """Number of epochs that have ended."""
    epoch_ended: bool = False
    """Whether an epoch has ended since trainers last averaged their losses."""
    rounds: Rounds | None = None
    """State of adaptive Local SGD: K, and the losses and learning rates that it depends on."""
    scale: Scale | None = None
    """State of the loss scaling."""

    @property
    def next_step(self) -> int:
        """Number of the next step."""
        return self.first_step if self.step is None else self.step + 1

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {name: dataclasses.asdict(value) if isinstance(value, Rounds | Scale) else value for name, value in self._asdict().items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> State:
        """Read the state that ``to_dict`` wrote."""
        rounds = None if data["rounds"] is None else Rounds(**data["rounds"])
        scale = None if data["scale"] is None else Scale(**data["scale"])
        return cls(**{**data, "rounds": rounds, "scale": scale})


def closed_round(before: State, after: State) -> int | None:
    """Return the number of updates in the round that an event ended, or None if it ended none."""
    if after.last_sync != after.updates or before.last_sync == after.last_sync:
        return None
    return after.updates - (before.origin if before.last_sync is None else before.last_sync)
