"""Local SGD: trainers update alone and average their parameters every K steps.

Fleet averages by delta from a snapshot: ``p = snapshot + mean(p - snapshot)``, parameters only.
An averaging runs behind the step's update: one collective a bucket, then the merge. Training
that ends, or a model that is read, between two averagings averages first (Fleet does not).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from fleetbench.plan.build import Plan
from fleetbench.plan.cadence import Cadence
from fleetbench.plan.events import BackwardEnd, DataEnd, Event, Flush, StepBegin
from fleetbench.plan.operations import Operation, Operations
from fleetbench.plan.protocol import Segment, Shape, State


class LocalSGD:
    """Averages parameters at the steps its cadence names."""

    payload: Literal["gradient", "delta"] = "delta"
    observes: frozenset[str] = frozenset()

    def __init__(self, plan: Plan, cadence: Cadence) -> None:
        self.plan = plan
        self.cadence = cadence

    def init(self, role: str, rank: int) -> State:  # noqa: ARG002  # trainers are alike; the protocol has roles that are not
        """See ``Strategy``."""
        return State()

    def on(self, state: State, now_ns: int, event: Event) -> tuple[State, Operations]:  # noqa: ARG002  # no collective is decided from the clock
        """See ``Strategy``."""
        if isinstance(event, StepBegin):
            return dataclasses.replace(state, step=event.step, in_step=True), ()
        if isinstance(event, BackwardEnd):
            assert state.step is not None
            synchronises = self.cadence.synchronises(state.step, state.last_sync)
            operations = self._round_end(state.next_id) if synchronises else (_update(state.next_id),)
            return self._after(state, state.step, operations, synchronises=synchronises), operations
        if isinstance(event, (DataEnd, Flush)) and state.step is not None and state.last_sync != state.step:
            operations = self._average(state.next_id, after=())
            return self._after(state, state.step, operations, synchronises=True), operations
        return state, ()

    def segment(self, state: State, limit: int) -> tuple[State, Segment]:
        """See ``Strategy``."""
        silent = ((),) * len(self.plan.buckets)
        local = Shape(on_bucket=silent, on_backward_end=(_update(0),), synchronises=False)
        meeting = Shape(on_bucket=silent, on_backward_end=self._round_end(0), synchronises=True)
        assert not state.in_step
        last, last_sync, sequence, count = state.step, state.last_sync, [], 0
        for step in range(state.next_step, state.next_step + limit):
            meets = self.cadence.synchronises(step, last_sync)
            last, last_sync = step, step if meets else last_sync
            sequence.append(int(meets))
            count += (meeting if meets else local).num_operations
        segment = Segment(first_step=state.next_step, first_id=state.next_id, shapes=(local, meeting), sequence=tuple(sequence))
        return dataclasses.replace(state, step=last, next_id=state.next_id + count, last_sync=last_sync), segment

    def _round_end(self, base: int) -> Operations:
        return (_update(base), *self._average(base + 1, after=(base,)))

    def _average(self, base: int, after: tuple[int, ...]) -> Operations:
        carry = tuple(dataclasses.replace(op.shifted(base, after), payload=self.payload) for op in self.plan.exchange)
        waits = tuple(leaf + base for leaf in self.plan.leaves) or after
        return (*carry, Operation(id=base + len(carry), kind="merge", after=waits))

    def _after(self, state: State, step: int, operations: Operations, *, synchronises: bool) -> State:
        last_sync = step if synchronises else state.last_sync
        return dataclasses.replace(state, next_id=operations[-1].id + 1, last_sync=last_sync, in_step=False)


def _update(base: int) -> Operation:
    return Operation(id=base, kind="update")
