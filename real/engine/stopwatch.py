"""Stopwatch: measures the parts of a rank's steps, by marks of a clock.

Within a step nothing is computed from the marks, because the host would wait for the device. A step becomes a record
after the device has passed its end: later steps check this when they begin, and ``finish`` waits for it.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

import torch

from fleetbench.plan.operations import Operation
from fleetbench.result import StepRecord
from fleetbench.timeline import start_name
from real.communication.clocks import Clock, Mark
from real.communication.lanes import host_reads

Stretch = tuple[Mark, Mark]
"""Marks of a begin and an end."""


class Queue:
    """First-in-first-out queue of collectives, of which ``depth`` run at once; computes when each one begins.

    The backend reports when a collective ends, but not when it begins. When one ends, the one that was handed over
    ``depth`` places later begins. ``now_ns`` reads the host's clock.
    """

    def __init__(self, depth: int, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._depth = depth
        self._now_ns = now_ns
        self._lock = Lock()
        self._num_joined = 0
        self._ends_ns: list[int] = []

    def join(self) -> Callable[[], tuple[int, int]]:
        """Add a collective; return a function to call at its end, on any thread, which returns begin and end in ns."""
        with self._lock:
            handed_ns, frees_place = self._now_ns(), self._num_joined - self._depth
            self._num_joined += 1

        def ended() -> tuple[int, int]:
            with self._lock:
                now_ns = self._now_ns()
                if frees_place < 0:
                    begin_ns = handed_ns
                elif frees_place < len(self._ends_ns):
                    begin_ns = max(handed_ns, self._ends_ns[frees_place])
                else:  # the backend carries more than ``depth``
                    begin_ns = now_ns
                self._ends_ns.append(now_ns)
                return begin_ns, now_ns

        return ended


@dataclass(slots=True)
class _Step:
    """A step that is running or not resolved yet; each mark is None until its moment comes."""

    step: int
    start: Mark
    last_forward_end: Mark | None = None
    forward_end: Mark | None = None
    """End of the last forward before the last backward."""
    backward_end: Mark | None = None
    end: Mark | None = None
    arrival: Mark | None = None
    started: Mark | None = None
    """Mark of the start of the exchange that the step waits for, if an earlier step started it."""
    stalls: list[Stretch] = field(default_factory=list)
    updates: list[Stretch] = field(default_factory=list)
    pauses: list[Stretch] = field(default_factory=list)
    local_steps: int | None = None
    loss: float | torch.Tensor | None = None
    bytes_sent: int = 0


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A finished step: its record with times of the raw clock, and the ns within it that do not count."""

    record: StepRecord
    paused_ns: int
    started_ns: int | None = None
    """Time in ns at which the exchange that the step waits for started, if an earlier step started it."""


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A span of a step on the compute stream, host or communicator; its ends are marks until resolved to ns."""

    step: int
    name: str
    start_ns: Mark
    end_ns: Mark
    communicator: int | None = None
    is_host: bool = False
    """Whether the span is host work that falls within compute."""


@dataclass(slots=True)
class Stopwatch:
    """Keeps one record per step.

    ``begin_step`` ends the step before, and ``finish`` the last one. The other methods are called in the order of a
    step: forward, backward, stall, update; with Local SGD, the stall follows the update. ``steps`` and ``spans`` are
    complete after ``finish``.
    """

    rank: int
    keep: bool = True
    """Whether to keep records and spans; off in a user's own training, which may run for weeks."""
    clock: Clock = field(default_factory=Clock)
    fetch_every: int = 1
    """Number of steps whose losses, if tensors, stay on their device until they are read together."""
    steps: list[TimedStep] = field(default_factory=list)
    spans: list[TimedSpan] = field(default_factory=list)
    on_stall: Callable[[Mark, Mark], None] | None = None
    """Called with the marks of the begin and end of each stall."""
    _no_step: _Step = field(default_factory=lambda: _Step(0, 0))
    """Stand-in for the current step before the first one and after ``finish``; never recorded."""
    _current: _Step = field(init=False)
    _mark: Mark = 0
    _flight: tuple[int, Mark] | None = None
    """Step and mark of the start of the last exchange of an average; None before the first."""
    _local: str = "update"
    _closed: deque[_Step] = field(default_factory=deque)
    _stretches: deque[TimedSpan] = field(default_factory=deque)
    _queues: dict[int, Queue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._current = self._no_step

    def begin_step(self, step: int) -> None:
        """End the step before, and begin ``step`` as its forward starts."""
        now = self.clock.mark()
        self._close(now)
        self._current = _Step(step, now)
        if self._is_due():
            self._read_losses()
        self._resolve(wait=False)

    def finish(self) -> None:
        """End the last step, including the read of losses that are due, and resolve all marks; waits for the device."""
        self._close(self.clock.mark())
        self._current = self._no_step
        if self._is_due():
            self._read_losses()
            self._closed[-1].end = self.clock.mark()
        self._read_losses()
        self._resolve(wait=True)

    def forward_ends(self) -> None:
        """Mark the end of a forward; if a step has several, all time before the end of the last counts as forward."""
        self._current.last_forward_end = self.clock.mark()

    def now(self) -> Mark | None:
        """Return a mark; None if no spans are kept."""
        return self.clock.mark() if self._remembers else None

    def started(self, bucket: int, begin: Mark | None) -> None:
        """Keep the host's span since ``begin``, in which it packed a bucket and started its operations."""
        if self._remembers:
            self._stretches.append(TimedSpan(self._current.step, start_name(bucket), begin, self.now(), is_host=True))

    def backward_ends(self) -> None:
        """Mark the end of the backward's computation, when the last gradient is there."""
        step = self._current
        step.backward_end = self._mark = self.clock.mark()
        step.forward_end = step.last_forward_end
        if step.forward_end is not None:
            self._span("forward", step.start, step.forward_end)
            self._span("backward", step.forward_end, step.backward_end)

    def arrives(self, *, of_average: bool = False) -> None:
        """Mark the arrival at the step's last collective so far; ``of_average``: a later step may wait for it."""
        step = self._current
        step.arrival = self.clock.mark()
        if of_average:
            self._flight = step.step, step.arrival

    def stall_begins(self) -> None:
        """Begin a stall after the update; the time since the last mark belongs to the update."""
        self.update_ends()
        step = self._current
        step.arrival = self._mark = step.updates[-1][1]
        if self._flight is not None and self._flight[0] != step.step:
            step.started = self._flight[1]
        self._local = "merge"

    def stall_ends(self) -> None:
        """End a stall, when the last collective has ended."""
        now = self.clock.mark()
        self._stalled(self._mark, now)
        self._mark = now

    def update_begins(self) -> None:
        """Begin the update, when the optimizer starts."""
        self._mark = self.clock.mark()
        self._local = "update"

    def update_ends(self) -> None:
        """End the update, when the parameters are those of the next step."""
        now = self.clock.mark()
        self._current.updates.append((self._mark, now))
        self._span(self._local, self._mark, now)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Count the time inside as a stall of the current step, if there is one."""
        begin = self.clock.mark()
        yield
        self._stalled(begin, self.clock.mark())

    def closes_round(self, local_steps: int) -> None:
        """Note that the step ends a round of ``local_steps`` steps."""
        self._current.local_steps = local_steps

    def sends(self, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes that the step sends."""
        self._current.bytes_sent += nbytes

    def loss(self, value: float | torch.Tensor) -> None:
        """Keep the step's loss on this rank; a one-element tensor is copied on its device, and read later."""
        if self.keep:
            self._current.loss = value.detach().reshape(()).clone() if isinstance(value, torch.Tensor) else value

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time inside from the step."""
        begin = self.clock.mark()
        yield
        self._current.pauses.append((begin, self.clock.mark()))

    @contextmanager
    def collective(self, operation: Operation, step: int, kind: str | None = None) -> Iterator[None]:
        """Time one collective, or its part ``kind``; runs on its lane."""
        begin = self.now()
        yield
        if begin is not None:
            name = f"{kind or operation.kind} {operation.payload if operation.bucket is None else operation.bucket}"
            self._stretches.append(TimedSpan(step, name, begin, self.now(), operation.communicator))

    def handed_over(self, operation: Operation, step: int, queue_depth: int) -> Callable[[], None] | None:
        """Add a collective to the queue of its communicator, which carries ``queue_depth`` at once.

        Returns a function to call when the collective ends, on any thread; None if no spans are kept.
        """
        if not self._remembers:
            return None
        ends = self._queues.setdefault(operation.communicator, Queue(queue_depth)).join()
        return lambda: self.spans.append(TimedSpan(step, f"{operation.kind} {operation.bucket}", *ends(), operation.communicator))

    def _stalled(self, begin: Mark, end: Mark) -> None:
        self._current.stalls.append((begin, end))
        self._span("wait", begin, end)
        if self.on_stall is not None and self._current is not self._no_step:
            self.on_stall(begin, end)

    @property
    def _remembers(self) -> bool:
        return self.keep and self._current is not self._no_step

    def _span(self, name: str, begin: Mark, end: Mark) -> None:
        if self._remembers:
            self._stretches.append(TimedSpan(self._current.step, name, begin, end))

    def _close(self, now: Mark) -> None:
        step = self._current
        if self.keep and step.forward_end is not None and step.backward_end is not None:
            step.end = now
            self._closed.append(step)

    def _is_due(self) -> bool:
        return sum(isinstance(closed.loss, torch.Tensor) for closed in self._closed) >= self.fetch_every

    def _read_losses(self) -> None:
        unread = [step for step in self._closed if isinstance(step.loss, torch.Tensor)]
        if unread:
            with host_reads():
                values = torch.stack([step.loss for step in unread if isinstance(step.loss, torch.Tensor)]).tolist()
            for step, value in zip(unread, values, strict=True):
                step.loss = value

    def _resolve(self, *, wait: bool) -> None:
        """Turn the marks that the device has passed into records and spans; ``wait``: wait for all marks."""
        while self._closed and not isinstance(self._closed[0].loss, torch.Tensor) and (wait or self.clock.passed(self._closed[0].end)):
            self.steps.append(self._timed(self._closed.popleft()))
        while self._stretches and (wait or self.clock.passed(self._stretches[0].end_ns)):  # lanes append from their own threads
            span = self._stretches.popleft()
            begin, end = self.clock.resolve([span.start_ns, span.end_ns])
            self.spans.append(dataclasses.replace(span, start_ns=begin, end_ns=end))

    def _timed(self, step: _Step) -> TimedStep:
        """Return a step with its times, after resolving all of its marks at once, on one scale."""
        stretches = [*step.stalls, *step.updates, *step.pauses]
        told = [step.start if mark is None else mark for mark in (step.arrival, step.started)]
        marks = [step.start, step.forward_end, step.backward_end, step.end, *told, *itertools.chain.from_iterable(stretches)]
        start, forward_end, backward_end, end, arrival, started, *times = self.clock.resolve(marks)
        pairs = zip(times[::2], times[1::2], strict=True)
        stalls = list(itertools.islice(pairs, len(step.stalls)))
        update_ns = _length(itertools.islice(pairs, len(step.updates)))
        assert not isinstance(step.loss, torch.Tensor)
        record = StepRecord(
            rank=self.rank,
            step=step.step,
            start_ns=start,
            forward_ns=forward_end - start - _overlap(stalls, start, forward_end),
            backward_ns=backward_end - forward_end - _overlap(stalls, forward_end, backward_end),
            stall_ns=_length(stalls),
            update_ns=update_ns,
            end_ns=end,
            arrival_ns=None if step.arrival is None else arrival,
            local_steps=step.local_steps,
            loss=step.loss,
            bytes_sent=step.bytes_sent,
        )
        return TimedStep(record, paused_ns=_length(pairs), started_ns=None if step.started is None else started)


def _length(stretches: Iterable[tuple[int, int]]) -> int:
    """Return the total length of the stretches in ns."""
    return sum(end - begin for begin, end in stretches)


def _overlap(stretches: list[tuple[int, int]], begin: int, end: int) -> int:
    """Return how many ns of ``stretches`` lie between two moments; a repeated exchange stalls within compute."""
    return sum(max(0, min(there, end) - max(here, begin)) for here, there in stretches)
