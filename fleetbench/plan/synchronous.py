"""Synchronous training: every bucket is averaged as it becomes ready, then one update.

Equal to DistributedDataParallel and to one process with the joint batch.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from fleetbench.plan.build import Plan
from fleetbench.plan.events import BackwardEnd, BucketReady, Event, StepBegin
from fleetbench.plan.operations import Operation, Operations
from fleetbench.plan.protocol import Segment, Shape, State


class Synchronous:
    """Averages gradients at every step."""

    payload: Literal["gradient", "delta"] = "gradient"
    observes: frozenset[str] = frozenset()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def init(self, role: str, rank: int) -> State:  # noqa: ARG002  # trainers are alike; the protocol has roles that are not
        """See ``Strategy``."""
        return State()

    def on(self, state: State, now_ns: int, event: Event) -> tuple[State, Operations]:  # noqa: ARG002  # no collective is decided from the clock
        """See ``Strategy``."""
        if isinstance(event, StepBegin):
            return dataclasses.replace(state, step=event.step, in_step=True), ()
        if isinstance(event, BucketReady):
            return state, self._carry(event.bucket, state.next_id)
        if isinstance(event, BackwardEnd):
            update = self._update(state.next_id)
            return dataclasses.replace(state, next_id=update.id + 1, last_sync=state.step, in_step=False), (update,)
        return state, ()

    def segment(self, state: State, limit: int) -> tuple[State, Segment]:
        """See ``Strategy``."""
        shape = Shape(
            on_bucket=tuple(self._carry(bucket.id, 0) for bucket in self.plan.buckets),
            on_backward_end=(self._update(0),),
            synchronises=True,
        )
        assert not state.in_step
        segment = Segment(first_step=state.next_step, first_id=state.next_id, shapes=(shape,), sequence=(0,) * limit)
        if limit == 0:
            return state, segment
        last = state.next_step + limit - 1
        next_id = state.next_id + limit * shape.num_operations
        return dataclasses.replace(state, step=last, next_id=next_id, last_sync=last), segment

    def _carry(self, bucket: int, base: int) -> Operations:
        return tuple(dataclasses.replace(op.shifted(base), payload=self.payload) for op in self.plan.of_bucket.get(bucket, ()))

    def _update(self, base: int) -> Operation:
        return Operation(id=base + len(self.plan.exchange), kind="update", after=tuple(leaf + base for leaf in self.plan.leaves))
