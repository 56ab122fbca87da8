"""Strategy: two functions over plain state. Executing what they decide is somebody else's job."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fleetbench.plan.build import Plan
from fleetbench.plan.events import Event
from fleetbench.plan.operations import Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A trainer's decisions so far. Plain data: it is saved with a checkpoint."""

    step: int | None = None
    """The step under way or done last; none before the first."""
    next_id: int = 0
    """Id of the next operation."""
    last_sync: int | None = None
    """The last step behind which trainers agreed; none before the first."""
    in_step: bool = False
    """Between ``StepBegin`` and ``BackwardEnd``."""
    first_step: int = 1
    """Number of the first step; below 1 where training warms up."""

    @property
    def next_step(self) -> int:
        """The step that follows."""
        return self.first_step if self.step is None else self.step + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> State:
        """The state that ``to_dict`` wrote."""
        return cls(**data)


def closed_round(before: State, after: State) -> int | None:
    """Steps of the round that lies closed behind an event; none where the event closed none."""
    if after.step is None or after.last_sync != after.step or before.last_sync == after.last_sync:
        return None
    return after.step - (before.first_step - 1 if before.last_sync is None else before.last_sync)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The operations of one step, by event: one tuple a bucket, then that of the backward's end.

    Ids count from 0 at the step's first operation.
    """

    on_bucket: tuple[Operations, ...]
    on_backward_end: Operations
    synchronises: bool

    @property
    def num_operations(self) -> int:
        """Operations of the step."""
        return sum(map(len, self.on_bucket)) + len(self.on_backward_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive steps at a stroke: few shapes, and which of them each step has."""

    first_step: int
    first_id: int
    shapes: tuple[Shape, ...]
    sequence: tuple[int, ...]
    """Index into ``shapes`` for every step."""

    def expand(self) -> list[tuple[int, tuple[Operations, ...]]]:
        """Every step with the operations of each of its events, ids as ``on`` gives them."""
        base = self.first_id
        steps = []
        for offset, index in enumerate(self.sequence):
            shape = self.shapes[index]
            events = (*shape.on_bucket, shape.on_backward_end)
            steps.append((self.first_step + offset, tuple(tuple(op.shifted(base) for op in event) for event in events)))
            base += shape.num_operations
        return steps


class Strategy(Protocol):
    """A trainer's strategy.

    ``on`` is called with ``StepBegin``, then ``BucketReady`` in the plan's order, then
    ``BackwardEnd``, step after step; ``Flush`` and ``DataEnd`` stand between steps. It is never
    called concurrently, and never decides a collective from ``now_ns``.
    """

    plan: Plan
    payload: Literal["gradient", "delta"]
    """What its buckets carry."""
    observes: frozenset[str]
    """Names of the scalars it must be told."""

    def init(self, role: str, rank: int) -> State:
        """The state before the first step."""
        ...

    def on(self, state: State, now_ns: int, event: Event) -> tuple[State, Operations]:
        """What to start now."""
        ...

    def segment(self, state: State, limit: int) -> tuple[State, Segment]:
        """The next ``limit`` steps at a stroke: equal to folding ``on``, ended before an observed scalar.

        ``state`` stands between two steps; its ``next_step`` is the segment's first.
        """
        ...
