"""Training by collectives: accumulation x cadence x exchange x scaler, composed.

Synchronous training averages every bucket as it becomes ready, then updates once: equal to
DistributedDataParallel and to one process with the joint batch. Local SGD updates alone and
averages parameters where its cadence says, by delta from a snapshot: ``p = snapshot + mean(p -
snapshot)``. Training that ends, or a model that is read, between two averagings averages first
(Fleet does not). Gradient merge lets several steps share an update; a cadence counts updates.
"""

from __future__ import annotations

from typing import Literal

from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, EpochEnd, Event, Flush, Observed, StepBegin
from fleetbench.plan.operations import Operation, Operations
from fleetbench.plan.protocol import Segment, Shape, State
from fleetbench.plan.steps import Course, average_of, remainder_of, shape_of


class CollectiveTraining:
    """Decides for trainers that meet in collectives."""

    def __init__(self, plan: Plan, combination: Combination) -> None:
        self.plan = plan
        self.payload: Literal["gradient", "delta"] = "delta" if combination.is_local else "gradient"
        self.observes = combination.observes
        self.combination = combination
        """What every step combines; executors ask it rather than the fields that it came from."""
        self._shapes: dict[Course, Shape] = {}

    def init(self, role: str, rank: int, first_step: int = 1) -> State:  # noqa: ARG002  # trainers are alike; the protocol has roles that are not
        """See ``Strategy``."""
        before, phase = divmod(first_step - 1, self.combination.steps_per_update)
        return State(
            first_step=first_step,
            phase=phase,
            origin=before,
            updates=before,
            rounds=self.combination.adaptive.start() if self.combination.adaptive else None,
            scale=self.combination.scaler.start() if self.combination.scaler else None,
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
            if course.asks_loss or untold or (course.closes and self.combination.scales):
                break
            sequence.append(shapes.setdefault(course, len(shapes)))
            next_id = state.next_id + self._shape_of(course).num_operations
            state = self._behind(state._replace(step=step, step_id=state.next_id, next_id=next_id), course)
        found = tuple(self._shape_of(course) for course in shapes)
        return state, Segment(first_step=first_step, first_id=first_id, shapes=found, sequence=tuple(sequence))

    def _course(self, state: State, *, flushes: bool = False) -> Course:
        """What sets the step under way, or the next one, apart; ``flushes``: an epoch's end, which updates by what the sum holds."""
        what, update = self.combination, state.updates + 1
        closes = flushes or state.phase + 1 == what.steps_per_update
        k = state.rounds.k if state.rounds else 0
        meets = closes and what.cadence is not None and what.cadence.synchronises(update, state.last_sync, k, state.epoch)
        asks_loss = False
        if meets and what.adaptive is not None and state.rounds is not None:
            asks_loss = what.adaptive.wants_loss(state.rounds, update, state.epoch_ended)
        return Course(closes=closes, merged=state.merged + (not flushes), meets=meets, asks_loss=asks_loss)

    def _shape_of(self, course: Course) -> Shape:
        if course not in self._shapes:
            self._shapes[course] = shape_of(self.plan, self.combination, course)
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
        agreed = course.meets or not self.combination.is_local
        last_sync = update if agreed else state.last_sync
        epoch_ended = state.epoch_ended and not course.asks_loss
        return state._replace(in_step=False, phase=0, merged=0, updates=update, last_sync=last_sync, epoch_ended=epoch_ended)

    def _end_backward(self, state: State) -> tuple[State, Operations]:
        assert state.in_step, "StepBegin comes before BackwardEnd"
        course = self._course(state)
        state, operations = self._issue(state, self._shape_of(course).on_backward_end)
        waits = course.closes and self.combination.scales
        return (state if waits else self._behind(state, course)), operations

    def _agree(self, state: State) -> tuple[State, Operations]:
        """Trainers that have updated alone since they last met average."""
        if not self.combination.is_local or state.updates in (state.last_sync, state.origin):
            return state, ()
        return self._between(state._replace(last_sync=state.updates), average_of(self.plan, self.combination))

    def _observe(self, state: State, event: Observed) -> tuple[State, Operations]:
        scaler, adaptive = self.combination.scaler, self.combination.adaptive
        if event.name == "found_inf" and scaler is not None and state.scale is not None and state.in_step:
            course = self._course(state)
            shape = self._shape_of(course)
            overflow = event.value != 0
            scale = scaler.after(state.scale, overflow)
            state, operations = self._issue(state, shape.on_overflow if overflow else shape.on_finite)
            return self._behind(state, course)._replace(scale=scale), operations
        if event.name == "lr" and adaptive is not None and state.rounds is not None:
            return state._replace(rounds=adaptive.on_lr(state.rounds, event.value)), ()
        if event.name == "loss" and adaptive is not None and state.rounds is not None:
            return state._replace(rounds=adaptive.on_loss(state.rounds, event.value, state.updates)), ()
        return state, ()

    def _end_epoch(self, state: State) -> tuple[State, Operations]:
        """A remainder of merged gradients is carried on (Fleet), applied as an update, or dropped."""
        state = state._replace(epoch=state.epoch + 1, epoch_ended=True)
        if self.combination.remainder == "carry" or not state.merged:
            return state, ()
        if self.combination.remainder == "drop":
            dropped = Operation(id=0, kind="reset", payload="gradient")
            return self._between(state._replace(phase=0, merged=0), (dropped,))
        course = self._course(state, flushes=True)
        return self._between(self._behind(state, course), remainder_of(self.plan, self.combination, course))


def _shifted(operations: Operations, base: int) -> Operations:
    return tuple(operation.shifted(base) for operation in operations)
