"""Trainer: one rank's steps on the simulated clock, and compute that collectives in flight may slow."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from simpy import Event

from fleetbench.plan.drive import Wanted, events_of, tell
from fleetbench.plan.events import BlockBegin, BucketReady
from fleetbench.plan.events import Event as PlanEvent
from fleetbench.plan.groups import part_of
from fleetbench.plan.layers import StepHead
from fleetbench.plan.operations import COLLECTIVES, Operation, wire_bytes
from fleetbench.plan.replay import Decider
from fleetbench.plan.state import closed_round
from fleetbench.result import StepRecord, uncountable
from fleetbench.stragglers import stretch
from fleetbench.timeline import COMPUTE, HOST, Span, start_name
from sim.clock import LATEST_NS, Clock, half_up
from sim.execution import Spans
from sim.own_work import OwnWork, holds_rank, moments_of
from sim.reference.network import Collectives, Computing, Meeting
from sim.scenario import Scenario

Waits = Generator[Event, object, None]
UPDATE = "update"
"""Timeline stream of updates that run in parallel with compute."""


class Trainer:
    """A trainer that computes, reports events to its strategy, and executes the operations that it returns.

    A step begins with its head, in which results are read back and the batch is taken (``StepHead``). Then
    come the forward; the backward, in which buckets become ready one after the other; and the operations at
    the end of the backward, of an epoch and of training.

    Collectives run in parallel with compute from the moment the trainer joins them, unless execution is
    sequential. So does a bucket's own update. A ``gate`` holds compute up, which counts as stall. Other local
    operations first wait for the operations they come after, which counts as stall, too. The part of the
    bucket updates that lies after compute counts as update; the rest of the time until the last of them ends
    is stall. ``OwnWork`` gives the durations of the rank's own operations. Those that were not measured take
    no time, because the durations of others include them.
    """

    def __init__(
        self,
        clock: Clock,
        rank: int,
        decider: Decider,
        collectives: Collectives,
        computing: Computing,
        scenario: Scenario,
        spans: Spans | None = None,
    ) -> None:
        """``spans``: receives the trainer's spans, if they are kept."""
        self.rank = rank
        self.decider = decider
        self.records: list[StepRecord] = []
        self.step_done: Callable[[int], None] = lambda _: None
        """Called at the end of each step with the number of steps done."""
        plan, table = scenario.plan, scenario.table
        self._clock = clock
        self._collectives = collectives
        self._computing = computing
        self._scenario = scenario
        moments = moments_of(plan, table)
        self._forward = [moment_ns for moment, moment_ns in moments if isinstance(moment, BlockBegin) and moment.phase == "forward"]
        self._backward = moments[len(self._forward) :]
        self._parts = {name: part_of(parts, rank) for name, parts in plan.groups}
        self._own = OwnWork(scenario)
        self._progress = Progress(clock, table.contention)
        self._updated: Event | None = None
        """End of the last bucket update; updates run in the order of their starts."""
        self._updates: list[tuple[int, int, int]] = []
        """Start and end of each bucket update, and when the last rank joined the collectives before it, all in ns."""
        self._in_flight: dict[int, Meeting] = {}
        self._spans = spans
        self._head = StepHead(table, scenario.fetch_every, clock.now)

    def run(self, draws: Sequence[int]) -> Waits:
        """Run the scenario's steps one after the other, each with its X of ``draws`` in units of 2^-24."""
        clock, scenario, progress, table = self._clock, self._scenario, self._progress, self._scenario.table
        forward_ns, compute_ns = table.forward_ns, table.forward_ns + table.backward_ns
        for step, x in zip(scenario.steps, draws, strict=True):
            start_ns, before = clock.now, self.decider.state
            events = events_of(scenario.plan, step, scenario.steps_per_epoch, scenario.steps[-1])
            self._tally = tally = Tally(self.rank, self._spans, counted_ns=start_ns)
            self._own.begin_step()
            yield from self._tell(next(events))
            tally.counted_ns = None
            yield clock.until(self._head.forward_begins(clock.now))
            read_end_ns, before_ns = clock.now, tally.stall_ns + tally.update_ns
            self._computing.begins(self.rank)
            progress.begin()
            for moment_ns in self._forward:
                yield from progress.reach(stretch(moment_ns, x))
                yield from self._tell(next(events))
            yield from progress.reach(stretch(forward_ns, x))
            forward_end_ns, gated_ns = clock.now, tally.gated_ns
            for moment, moment_ns in self._backward:
                yield from progress.reach(stretch(moment_ns, x))
                begun_ns = clock.now
                yield from self._tell(next(events))
                if isinstance(moment, BucketReady):
                    tally.span(start_name(moment.bucket), begun_ns, clock.now, HOST)
            yield from progress.reach(stretch(compute_ns, x))
            backward_end_ns = clock.now
            self._computing.ends(self.rank)
            tally.span("forward", read_end_ns, forward_end_ns)
            tally.span("backward", forward_end_ns, backward_end_ns)
            tally.counted_ns = backward_end_ns
            for event in events:
                yield from self._tell(event)
                yield from self._finish_updates()
            if step == scenario.steps[-1] and self._head.read_ns():
                yield clock.timeout(self._head.read_ns())
            self.records.append(
                StepRecord(
                    rank=self.rank,
                    step=step,
                    start_ns=start_ns,
                    read_ns=read_end_ns - start_ns - before_ns,
                    forward_ns=forward_end_ns - read_end_ns - gated_ns,
                    backward_ns=backward_end_ns - forward_end_ns - (tally.gated_ns - gated_ns),
                    stall_ns=tally.stall_ns,
                    wait_ns=tally.wait_ns,
                    update_ns=tally.update_ns,
                    end_ns=clock.now,
                    arrival_ns=tally.arrival_ns,
                    local_steps=closed_round(before, self.decider.state),
                    loss=scenario.scalars.declared_loss(step),
                    bytes_sent=tally.bytes_sent,
                )
            )
            if clock.now > LATEST_NS:
                raise uncountable()
            self.step_done(len(self.records))

    def _tell(self, event: PlanEvent) -> Waits:
        for request in tell(self.decider, event, lambda: self._clock.now):
            if isinstance(request, Wanted):
                if request.name == "found_inf":
                    yield from self._wait(list(self._in_flight.values()))
                request.value = self._scenario.scalar(request.name, self.rank, self.decider.state)
            else:
                for operation in request.operations:
                    yield from self._run(operation)

    def _run(self, operation: Operation) -> Waits:
        after = [self._in_flight[other] for other in operation.after if other in self._in_flight]
        if operation.kind in COLLECTIVES:
            yield from self._start(operation, after)
        elif operation.kind == "gate":
            yield from self._gate(after)
        elif operation.kind == "update" and operation.bucket is not None:
            self._updated = self._clock.process(self._update(self._own.bucket_update(operation.bucket), after, self._updated))
        else:
            yield from self._execute(operation, after)

    def _start(self, operation: Operation, after: Sequence[Meeting]) -> Waits:
        part = self._parts[operation.group]
        if len(part) < 2:  # no other rank to meet
            return
        yield from self._work(self._own.joining(operation))
        meeting = self._collectives.join(operation, part, after)
        self._in_flight[operation.id] = meeting
        meeting.end.callbacks.append(lambda _: self._in_flight.__delitem__(operation.id))
        self._progress.slows_during(meeting.start, meeting.end)
        self._tally.arrival_ns = self._clock.now
        self._tally.bytes_sent += wire_bytes(operation, len(part))
        if self._scenario.strategy.combination.is_sequential or holds_rank(operation):
            computed = self._computing.ends(self.rank)
            yield from self._wait([meeting])
            if computed:
                self._computing.begins(self.rank)

    def _execute(self, operation: Operation, after: Sequence[Meeting]) -> Waits:
        yield from self._wait(after)
        name, takes_ns = self._own.local(operation)
        start_ns = self._clock.now
        yield from self._work(takes_ns)
        if name is not None:
            self._tally.span(name, start_ns, self._clock.now)

    def _work(self, took_ns: int) -> Waits:
        """Spend time on own work. After compute, the time is the step's update."""
        if took_ns:
            start_ns = self._clock.now
            yield self._clock.timeout(took_ns)
            self._tally.works(start_ns, self._clock.now)

    def _gate(self, meetings: Sequence[Meeting]) -> Waits:
        """Hold compute up until these collectives have ended. The time is stall, in any part of the step."""
        if meetings:
            start_ns = self._clock.now
            self._computing.ends(self.rank)
            yield self._clock.all_of([meeting.end for meeting in meetings])
            self._computing.begins(self.rank)
            self._tally.gates(start_ns, self._clock.now, _met_ns(meetings))

    def _wait(self, meetings: Sequence[Meeting]) -> Waits:
        """Wait for these collectives. After compute, the time is the step's stall."""
        if meetings:
            yield self._clock.all_of([meeting.end for meeting in meetings])
        self._tally.stalls(self._clock.now, _met_ns(meetings))

    def _update(self, took_ns: int, after: Sequence[Meeting], before: Event | None) -> Waits:
        """Update a bucket in parallel with compute, once ``after`` and the update ``before`` it have ended."""
        yield self._clock.all_of([*(meeting.end for meeting in after), *([] if before is None else [before])])
        start_ns = self._clock.now
        yield self._clock.timeout(took_ns)
        self._updates.append((start_ns, self._clock.now, _met_ns(after)))

    def _finish_updates(self) -> Waits:
        if self._updated is None:
            return
        yield self._updated
        for start_ns, end_ns, met_ns in self._updates:
            self._tally.span(UPDATE, start_ns, end_ns, UPDATE)
            self._tally.works(start_ns, end_ns, met_ns)
        self._updated, self._updates = None, []


@dataclass(slots=True)
class Tally:
    """One rank's times in a step.

    After compute, every moment is stall or update; compute counts as neither.
    """

    rank: int
    spans: Spans | None
    """Where the rank's spans go; ``None`` if they are not kept."""
    stall_ns: int = 0
    wait_ns: int = 0
    """Part of the stall in ns, until the last rank had joined the collective that this one waited for."""
    gated_ns: int = 0
    """Part of the stall in ns, during which gates held compute up."""
    update_ns: int = 0
    arrival_ns: int | None = None
    bytes_sent: int = 0
    counted_ns: int | None = None
    """Time in ns up to which the time after compute has been counted; ``None`` during compute."""

    def stalls(self, until_ns: int, met_ns: int) -> None:
        """Count the time since the rank's last operation as stall; up to ``met_ns`` it is a wait for other ranks."""
        if self.counted_ns is not None and until_ns > self.counted_ns:
            self.span("wait", self.counted_ns, until_ns)
            self.wait_ns += min(max(met_ns, self.counted_ns), until_ns) - self.counted_ns
            self.stall_ns += until_ns - self.counted_ns
            self.counted_ns = until_ns

    def gates(self, start_ns: int, end_ns: int, met_ns: int) -> None:
        """Count the time in which a gate held compute up as stall; up to ``met_ns`` it is a wait for other ranks."""
        self.span("wait", start_ns, end_ns)
        self.wait_ns += min(max(met_ns, start_ns), end_ns) - start_ns
        self.stall_ns += end_ns - start_ns
        self.gated_ns += end_ns - start_ns

    def works(self, start_ns: int, end_ns: int, met_ns: int = 0) -> None:
        """Count an update or a merge after compute as update, and the time before its start as stall."""
        self.stalls(start_ns, met_ns)
        if self.counted_ns is not None and end_ns > self.counted_ns:
            self.update_ns += end_ns - self.counted_ns
            self.counted_ns = end_ns

    def span(self, name: str, start_ns: int, end_ns: int, stream: str = COMPUTE) -> None:
        """Add a span that takes time."""
        if self.spans is not None and end_ns > start_ns:
            self.spans.add(Span(self.rank, stream, name, start_ns, end_ns - start_ns))


def _met_ns(meetings: Sequence[Meeting]) -> int:
    """Return the time in ns at which the last rank joined ``meetings`` and the collectives before them; 0 if empty."""
    return max((meeting.met_ns for meeting in meetings), default=0)


class Progress:
    """Progress of one step's compute, in ns of undisturbed compute.

    A step starts at 0 with ``begin`` and proceeds only during ``reach``: whatever happens between two calls
    holds compute up. While collectives of the rank are in flight, compute takes 1 + ``contention`` times as
    long. Progress is integrated exactly, and the time of each mark that is reached is rounded once.
    """

    def __init__(self, clock: Clock, contention: float) -> None:
        self._clock = clock
        # the decimal that a file writes, not the double next to it
        self._slow = 1 + Fraction(repr(contention))
        self._in_flight = 0
        self._done_ns: Fraction | int = 0
        self._since_ns: int | None = None
        self._changed: Event | None = None
        self._before: tuple[int, Fraction] | None = None
        """Time in ns of the last change of pace, and the pace before it."""

    def begin(self) -> None:
        """Start a step, with nothing computed yet."""
        self._done_ns = 0

    def slows_during(self, start: Event, end: Event) -> None:
        """Slow compute between two events, the start and the end of a collective of this rank."""
        if self._slow == 1:
            return
        start.callbacks.append(lambda _: self._change(1))
        end.callbacks.append(lambda _: self._change(-1))

    def reach(self, mark_ns: int) -> Generator[Event, object, None]:
        """Compute up to a mark, in ns of undisturbed compute."""
        if self._slow == 1:  # nothing disturbs, so the next mark is a known time
            if self._done_ns < mark_ns:
                yield self._clock.timeout(mark_ns - int(self._done_ns))
                self._done_ns = mark_ns
            return
        while self._done_ns < mark_ns:
            self._since_ns = self._clock.now
            self._changed = self._clock.event()
            reached = self._clock.timeout(self._delay_ns(mark_ns - self._done_ns))
            yield reached | self._changed
            self._integrate()
            if reached.processed:
                break
        self._since_ns = self._changed = None

    @property
    def _pace(self) -> Fraction:
        return self._slow if self._in_flight else Fraction(1)

    def _delay_ns(self, left_ns: Fraction | int) -> int:
        """Return the time in ns in which the remaining compute will be done.

        If the pace has changed at this very time and the remaining compute rounds to 0 ns at the pace before, it is
        done: so the order of simultaneous events does not matter.
        """
        if self._before is not None and self._before[0] == self._clock.now and half_up(left_ns * self._before[1]) <= 0:
            return 0
        return max(half_up(left_ns * self._pace), 0)

    def _integrate(self) -> None:
        if self._since_ns is not None:
            self._done_ns += (self._clock.now - self._since_ns) / self._pace
            self._since_ns = self._clock.now

    def _change(self, collectives: int) -> None:
        self._integrate()
        if self._before is None or self._before[0] != self._clock.now:
            self._before = (self._clock.now, self._pace)
        self._in_flight += collectives
        if self._changed is not None and not self._changed.triggered:
            self._changed.succeed()
