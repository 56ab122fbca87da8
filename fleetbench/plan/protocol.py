"""Strategy: two functions over plain state. Executing what they decide is somebody else's job."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from fleetbench.plan.adaptive import Rounds
from fleetbench.plan.build import Plan
from fleetbench.plan.events import Event
from fleetbench.plan.operations import Operations
from fleetbench.plan.scaler import Scale


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
    """The last update behind which trainers agreed; none before the first."""
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
        rounds, scale = data["rounds"], data["scale"]
        return cls(
            **{
                **data,
                "rounds": None if rounds is None else Rounds(**rounds),
                "scale": None if scale is None else Scale(**scale),
            }
        )


def closed_round(before: State, after: State) -> int | None:
    """Updates of the round that lies closed behind an event; none where the event closed none."""
    if after.last_sync != after.updates or before.last_sync == after.last_sync:
        return None
    return after.updates - (before.origin if before.last_sync is None else before.last_sync)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The operations of one step, by event. Ids count from 0 at the step's first operation."""

    on_begin: Operations = ()
    on_bucket: tuple[Operations, ...]
    on_backward_end: Operations
    on_finite: Operations = ()
    """Behind an observed ``found_inf`` of 0."""
    on_overflow: Operations = ()
    """Behind another."""
    synchronises: bool

    @property
    def num_operations(self) -> int:
        """Operations of the step, where nothing is observed in it."""
        return len(self.on_begin) + sum(map(len, self.on_bucket)) + len(self.on_backward_end)


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
            events = (shape.on_begin, *shape.on_bucket, shape.on_backward_end)
            steps.append((self.first_step + offset, tuple(tuple(op.shifted(base) for op in event) for event in events)))
            base += shape.num_operations
        return steps


class Strategy(Protocol):
    """A trainer's strategy: what it is told, and when, is ``fleetbench.plan.drive``. It never decides a collective from ``now_ns``."""

    plan: Plan
    payload: Literal["gradient", "delta"]
    """What its buckets carry."""
    observes: frozenset[str]
    """Names of the scalars it must be told."""

    def init(self, role: str, rank: int, first_step: int = 1) -> State:
        """The state before the first step."""
        ...

    def on(self, state: State, now_ns: int, event: Event) -> tuple[State, Operations]:
        """What to start now."""
        ...

    def segment(self, state: State, limit: int) -> tuple[State, Segment]:
        """The next steps at a stroke, ``limit`` of them or fewer: equal to folding ``on``.

        It ends before the first step in which a scalar is observed. Only the executor knows where
        the learning rate changes: its ``limit`` ends before the ``merge`` behind which a new one is
        told. ``state`` stands between two steps; its ``next_step`` is the segment's first.
        """
        ...


def begin_anew(saved: State, strategy: Strategy, rank: int, *, same_strategy: bool) -> State:
    """The state after ``saved`` of trainers that begin anew under ``strategy``, from parameters that all of them share.

    What had been begun for an agreement among the old trainers is closed: a round of Local SGD, because all
    start from the average; a gradient merge, because its sum is lost.

    Steps, epochs and a loss scale go on. With the same strategy so do updates, the K of an adaptive
    round and what it follows; under another one updates count from its own first, because what they
    count may be another number of steps.
    """
    if same_strategy:
        agreed = saved.last_sync if saved.updates == saved.origin else saved.updates
        return saved._replace(in_step=False, phase=0, merged=0, last_sync=agreed)
    fresh = strategy.init("trainer", rank, saved.next_step)
    scale = fresh.scale if fresh.scale is None or saved.scale is None else saved.scale
    return fresh._replace(phase=0, epoch=saved.epoch, epoch_ended=saved.epoch_ended, scale=scale)
