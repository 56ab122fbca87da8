"""Trainer: one rank's steps on the simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from simpy import Event

from fleetbench.plan.build import Plan
from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, StepBegin
from fleetbench.plan.events import Event as PlanEvent
from fleetbench.plan.layers import LayerTable
from fleetbench.plan.operations import COLLECTIVES, Operation, wire_bytes
from fleetbench.plan.protocol import closed_round
from fleetbench.plan.replay import Decider
from fleetbench.result import StepRecord
from fleetbench.stragglers import stretch
from fleetbench.timeline import COMPUTE, Span
from sim.clock import Clock
from sim.collectives import Collectives

Waits = Generator[Event, object, None]


@dataclass(slots=True)
class Tally:
    """What a step has cost so far, beside its compute."""

    idle_since_ns: int = 0
    """The last end of compute or of a local operation."""
    stall_ns: int = 0
    update_ns: int = 0
    arrival_ns: int | None = None
    bytes_sent: int = 0


class Trainer:
    """A trainer that computes, tells its strategy what happened, and executes what that returns.

    A step: read the batch; forward; backward, in which buckets become ready one after the other;
    then whatever the strategy decides at the backward's end. Collectives run beside compute, from
    the moment the trainer joins them; local operations (``update``, ``merge``) first wait for the
    operations they come after, which is the step's stall.
    """

    def __init__(self, clock: Clock, rank: int, decider: Decider, collectives: Collectives, plan: Plan, table: LayerTable) -> None:
        self.rank = rank
        self.decider = decider
        self.records: list[StepRecord] = []
        self.spans: list[Span] = []
        self._clock = clock
        self._collectives = collectives
        self._plan = plan
        self._table = table
        self._group_size = {name: len(ranks) for name, ranks in plan.groups}
        self._ready_ns = _bucket_readiness(plan, table)
        self._compute_ns = table.forward_ns + table.backward_ns
        self._took_ns = {"update": table.update, "merge": table.merge}
        self._in_flight: dict[int, Event] = {}
        self._tally = Tally()

    def run(self, steps: Sequence[int], draws: Sequence[int], step_done: Callable[[], None]) -> Waits:
        """The process: ``steps`` one after the other, each with its X of ``draws`` in units of 2^-24."""
        last = steps[-1]
        for step, x in zip(steps, draws, strict=True):
            start_ns, before = self._clock.now, self.decider.state
            self._tally = Tally()
            yield from self._tell(StepBegin(step))
            yield self._clock.timeout(self._table.read)
            read_end_ns = self._clock.now
            yield from self._compute(x)
            forward_ns = stretch(self._table.forward_ns, x)
            backward_ns = self._clock.now - read_end_ns - forward_ns
            self._span("forward", read_end_ns, forward_ns)
            self._span("backward", read_end_ns + forward_ns, backward_ns)
            self._tally.idle_since_ns = self._clock.now
            yield from self._tell(BackwardEnd())
            if step == last:
                yield from self._tell(DataEnd())
            self.records.append(
                StepRecord(
                    rank=self.rank,
                    step=step,
                    start_ns=start_ns,
                    read_ns=read_end_ns - start_ns,
                    forward_ns=forward_ns,
                    backward_ns=backward_ns,
                    stall_ns=self._tally.stall_ns,
                    update_ns=self._tally.update_ns,
                    end_ns=self._clock.now,
                    arrival_ns=self._tally.arrival_ns,
                    local_steps=closed_round(before, self.decider.state),
                    loss=None,
                    bytes_sent=self._tally.bytes_sent,
                )
            )
            step_done()

    def _compute(self, x: int) -> Waits:
        """Forward and backward. What starting collectives takes from the host delays the compute behind it."""
        begin_ns = self._clock.now
        for bucket, ready_ns in zip(self._plan.buckets, self._ready_ns, strict=True):
            yield self._clock.until(begin_ns + stretch(ready_ns, x))
            told_ns = self._clock.now
            yield from self._tell(BucketReady(bucket.id))
            begin_ns += self._clock.now - told_ns
        yield self._clock.until(begin_ns + stretch(self._compute_ns, x))

    def _tell(self, event: PlanEvent) -> Waits:
        for operation in self.decider.on(self._clock.now, event):
            assert all(other < operation.id for other in operation.after), f"{operation} comes after one that was not started"
            after = [self._in_flight[other] for other in operation.after if other in self._in_flight]
            if operation.kind in COLLECTIVES:
                yield from self._start(operation, after)
            else:
                yield from self._execute(operation, after)

    def _start(self, operation: Operation, after: Sequence[Event]) -> Waits:
        if self._table.host_per_collective:
            yield self._clock.timeout(self._table.host_per_collective)
        self._in_flight[operation.id] = end = self._collectives.join(operation, after)
        end.callbacks.append(lambda _: self._land(operation))
        self._tally.arrival_ns = self._clock.now
        self._tally.bytes_sent += wire_bytes(operation, self._group_size[operation.group])

    def _land(self, operation: Operation) -> None:
        del self._in_flight[operation.id]

    def _execute(self, operation: Operation, after: Sequence[Event]) -> Waits:
        if after:
            yield self._clock.all_of(after)
        tally, start_ns = self._tally, self._clock.now
        self._span("wait", tally.idle_since_ns, start_ns - tally.idle_since_ns)
        tally.stall_ns += start_ns - tally.idle_since_ns
        took_ns = self._took_ns[operation.kind]
        yield self._clock.timeout(took_ns)
        self._span(operation.kind, start_ns, took_ns)
        tally.update_ns += took_ns
        tally.idle_since_ns = self._clock.now

    def _span(self, name: str, start_ns: int, duration_ns: int) -> None:
        if duration_ns:
            self.spans.append(Span(self.rank, COMPUTE, name, start_ns, duration_ns))


def _bucket_readiness(plan: Plan, table: LayerTable) -> list[int]:
    """From the start of the forward until each bucket and all before it are ready, in ns at X = 0."""
    ready_ns = {gradient.name: gradient.ready for layer in table.layers for gradient in layer.gradients}
    own = (max(ready_ns[name] for name in bucket.gradients) for bucket in plan.buckets)
    return [table.forward_ns + latest for latest in accumulate(own, max)]
