"""Training by collectives: accumulation x cadence x exchange x scaler, composed.

Synchronous training averages every bucket as it becomes ready, then updates once: equal to
DistributedDataParallel and to one process with the joint batch. Local SGD updates alone and
averages parameters where its cadence says, by delta from a snapshot: ``p = snapshot + mean(p -
snapshot)``. Training that ends, or a model that is read, between two averagings averages first
(Fleet does not). Gradient merge lets several steps share an update; a cadence counts updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleetbench.plan.adaptive import AdaptiveK
from fleetbench.plan.build import Plan
from fleetbench.plan.cadence import Cadence
from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, EpochEnd, Event, Flush, Observed, StepBegin
from fleetbench.plan.operations import Operation, Operations
from fleetbench.plan.protocol import Segment, Shape, State
from fleetbench.plan.scaler import LossScaler
from fleetbench.plan.steps import Combination, Course, average_of, remainder_of, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """How many steps share an update, and what becomes of those that an epoch's end leaves over."""

    steps: int = 1
    remainder: Literal["carry", "flush", "drop"] = "carry"


class CollectiveTraining:
    """Decides for trainers that meet in collectives.

    ``cadence`` says where trainers that update alone meet; none means that they never part.
    """

    def __init__(
        self,
        combination: Combination,
        accumulation: Accumulation,
        *,
        cadence: Cadence | None = None,
        adaptive: AdaptiveK | None = None,
        scaler: LossScaler | None = None,
        observes: frozenset[str] = frozenset(),
    ) -> None:
        self.plan: Plan = combination.plan
        self.payload: Literal["gradient", "delta"] = "gradient" if cadence is None else "delta"
        self.observes = observes
        self.combination = combination
        """What every step combines; executors ask it rather than the fields that it came from."""
        self._accumulation = accumulation
        self._cadence = cadence
        self._adaptive = adaptive
        self._scaler = scaler
        self._shapes: dict[Course, Shape] = {}

    def init(self, role: str, rank: int, first_step: int = 1) -> State:  # noqa: ARG002  # trainers are alike; the protocol has roles that are not
        """See ``Strategy``."""
        before, phase = divmod(first_step - 1, self._accumulation.steps)
        return State(
            first_step=first_step,
            phase=phase,
            origin=before,
            updates=before,
            rounds=self._adaptive.start() if self._adaptive else None,
            scale=self._scaler.start() if self._scaler else None,
        )

    def on(self, state: State, now_ns: int, event: Event) -> tuple[State, Operations]:  # noqa: ARG002, PLR0911  # nothing is decided from the clock; one line an event
        """See ``Strategy``."""
        match event:
            case StepBegin(step):
                assert not state.in_step, "a step ends before the next begins; found_inf is still to be told"
                begun = state._replace(step=step, in_step=True, step_id=state.next_id)
                return self._issue(begun, self._shape_of(self._course(begun)).on_begin)
            case BucketReady(bucket):
                return self._issue(state, self._shape_of(self._course(state)).on_bucket[bucket])
            case BackwardEnd():
                return self._end_backward(state)
            case Observed():
                return self._observe(state, event)
            case EpochEnd():
                return self._end_epoch(state)
            case DataEnd() | Flush():
                return self._agree(state)
            case _:
                return state, ()

    def segment(self, state: State, limit: int) -> tuple[State, Segment]:
        """See ``Strategy``."""
        assert not state.in_step
        first_step, first_id = state.next_step, state.next_id
        shapes: dict[Course, int] = {}
        sequence = []
        for step in range(first_step, first_step + limit):
            course = self._course(state)
            untold = course.meets and state.rounds is not None and state.rounds.lr is None
            if course.asks_loss or untold or (course.closes and self._scaler):
                break
            sequence.append(shapes.setdefault(course, len(shapes)))
            next_id = state.next_id + self._shape_of(course).num_operations
            state = self._behind(state._replace(step=step, step_id=state.next_id, next_id=next_id), course)
        found = tuple(self._shape_of(course) for course in shapes)
        return state, Segment(first_step=first_step, first_id=first_id, shapes=found, sequence=tuple(sequence))

    def _course(self, state: State) -> Course:
        """What sets the step under way, or the next one, apart."""
        closes = state.phase + 1 == self._accumulation.steps
        update = state.updates + 1
        meets = closes and self._meets(state, update)
        asks = meets and self._asks_loss(state, update)
        return Course(closes=closes, merged=state.merged + 1, meets=meets, asks_loss=asks)

    def _meets(self, state: State, update: int) -> bool:
        if self._cadence is None:
            return False
        k = state.rounds.k if state.rounds else 0
        return self._cadence.synchronises(update, state.last_sync, k, state.epoch)

    def _asks_loss(self, state: State, update: int) -> bool:
        return (
            self._adaptive is not None and state.rounds is not None and self._adaptive.wants_loss(state.rounds, update, state.epoch_ended)
        )

    def _shape_of(self, course: Course) -> Shape:
        if course not in self._shapes:
            self._shapes[course] = shape_of(self.combination, course)
        return self._shapes[course]

    def _issue(self, state: State, operations: Operations) -> tuple[State, Operations]:
        """Operations of the step under way, with their final ids."""
        if not operations:
            return state, ()
        issued = _shifted(operations, state.step_id)
        return state._replace(next_id=issued[-1].id + 1), issued

    def _between(self, state: State, operations: Operations) -> tuple[State, Operations]:
        """Operations that belong to no step."""
        return self._issue(state._replace(step_id=state.next_id), operations)

    def _behind(self, state: State, course: Course) -> State:
        """The state behind a step's update or skip."""
        if not course.closes:
            return state._replace(in_step=False, phase=state.phase + 1, merged=course.merged)
        update = state.updates + 1
        agreed = course.meets or self._cadence is None
        last_sync = update if agreed else state.last_sync
        epoch_ended = state.epoch_ended and not course.asks_loss
        return state._replace(in_step=False, phase=0, merged=0, updates=update, last_sync=last_sync, epoch_ended=epoch_ended)

    def _end_backward(self, state: State) -> tuple[State, Operations]:
        assert state.in_step, "StepBegin comes before BackwardEnd"
        course = self._course(state)
        state, operations = self._issue(state, self._shape_of(course).on_backward_end)
        waits = course.closes and self._scaler is not None
        return (state if waits else self._behind(state, course)), operations

    def _agree(self, state: State) -> tuple[State, Operations]:
        """Trainers that have updated alone since they last met average."""
        if self._cadence is None or state.updates in (state.last_sync, state.origin):
            return state, ()
        return self._between(state._replace(last_sync=state.updates), average_of(self.combination))

    def _observe(self, state: State, event: Observed) -> tuple[State, Operations]:
        if event.name == "found_inf" and self._scaler is not None and state.scale is not None and state.in_step:
            course = self._course(state)
            shape = self._shape_of(course)
            overflow = event.value != 0
            scale = self._scaler.after(state.scale, overflow)
            state, operations = self._issue(state, shape.on_overflow if overflow else shape.on_finite)
            return self._behind(state, course)._replace(scale=scale), operations
        if event.name == "lr" and self._adaptive is not None and state.rounds is not None:
            return state._replace(rounds=self._adaptive.on_lr(state.rounds, event.value)), ()
        if event.name == "loss" and self._adaptive is not None and state.rounds is not None:
            return state._replace(rounds=self._adaptive.on_loss(state.rounds, event.value, state.updates)), ()
        return state, ()

    def _end_epoch(self, state: State) -> tuple[State, Operations]:
        """A remainder of merged gradients is carried on (Fleet), applied as an update, or dropped."""
        state = state._replace(epoch=state.epoch + 1, epoch_ended=True)
        if self._accumulation.remainder == "carry" or not state.merged:
            return state, ()
        if self._accumulation.remainder == "drop":
            dropped = Operation(id=0, kind="reset", payload="gradient")
            return self._between(state._replace(phase=0, merged=0), (dropped,))
        update = state.updates + 1
        meets = self._meets(state, update)
        asks = meets and self._asks_loss(state, update)
        course = Course(closes=True, merged=state.merged, meets=meets, asks_loss=asks)
        return self._between(self._behind(state, course), remainder_of(self.combination, course))


def _shifted(operations: Operations, base: int) -> Operations:
    return tuple(operation.shifted(base) for operation in operations)
