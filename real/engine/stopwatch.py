"""Stopwatch: the parts of a rank's steps, measured by a clock's marks.

Inside a step nothing is computed from the marks, because on a device that would wait for it: a
step becomes a record once the device has passed its end, which is looked at when later steps
begin, and waited for in ``finish``.
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
    """First in, first out, and ``depth`` under way at once: the others wait until one of those ends.

    The backend says when a collective ended, and not when it began; but which of them begins then is
    known: the one that was handed over ``depth`` places later. ``now_ns`` is the host's clock.
    """

    def __init__(self, depth: int, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._depth = depth
        self._now_ns = now_ns
        self._lock = Lock()
        self._num_joined = 0
        self._ends_ns: list[int] = []

    def join(self) -> Callable[[], tuple[int, int]]:
        """Count a collective handed over to the backend. Call the result when it ends, on any thread: it returns begin and end in ns."""
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
                else:  # the backend carries more than was thought
                    begin_ns = now_ns
                self._ends_ns.append(now_ns)
                return begin_ns, now_ns

        return ended


@dataclass(slots=True)
class _Step:
    """A step under way or not yet resolved; marks, none before their moment has come."""

    step: int
    start: Mark
    last_forward_end: Mark | None = None
    forward_end: Mark | None = None
    """End of the last forward before the last backward."""
    backward_end: Mark | None = None
    end: Mark | None = None
    arrival: Mark | None = None
    started: Mark | None = None
    """Start of the exchange that the step waits for, if an earlier step started it."""
    stalls: list[Stretch] = field(default_factory=list)
    updates: list[Stretch] = field(default_factory=list)
    pauses: list[Stretch] = field(default_factory=list)
    local_steps: int | None = None
    loss: float | torch.Tensor | None = None
    bytes_sent: int = 0


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A finished step: its record on the raw clock, and the time in it that does not count."""

    record: StepRecord
    paused_ns: int
    started_ns: int | None = None
    """Start of the exchange that the step waits for, in ns, if an earlier step started it."""


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A stretch of a step, on the compute stream, on the host or on a communicator's stream; its ends are marks until they are resolved."""

    step: int
    name: str
    start_ns: Mark
    end_ns: Mark
    communicator: int | None = None
    is_host: bool = False
    """Whether the span is work of the host within compute."""


@dataclass(slots=True)
class Stopwatch:
    """Keeps one record a step.

    ``begin_step`` closes the step before; ``finish`` closes the last one. The other methods are
    called in the order of a step: forward, backward, stall, update, and with Local SGD the stall
    after the update. ``steps`` and ``spans`` are complete after ``finish``.
    """

    rank: int
    keep: bool = True
    """Whether to keep records and spans; off in a user's own training, which may run for weeks."""
    clock: Clock = field(default_factory=Clock)
    fetch_every: int = 1
    """Number of steps for which losses that are tensors stay on their device before they are read together."""
    steps: list[TimedStep] = field(default_factory=list)
    spans: list[TimedSpan] = field(default_factory=list)
    on_stall: Callable[[Mark, Mark], None] | None = None
    """Called with begin and end of each stall."""
    _no_step: _Step = field(default_factory=lambda: _Step(0, 0))
    """Stand-in for the current step before the first one and after ``finish``; it is in no record."""
    _current: _Step = field(init=False)
    _mark: Mark = 0
    _flight: tuple[int, Mark] | None = None
    """The step and the moment in which the last exchange of an average was started."""
    _local: str = "update"
    _closed: deque[_Step] = field(default_factory=deque)
    _stretches: deque[TimedSpan] = field(default_factory=deque)
    _queues: dict[int, Queue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._current = self._no_step

    def begin_step(self, step: int) -> None:
        """The forward of ``step`` starts, and the step before ends."""
        now = self.clock.mark()
        self._close(now)
        self._current = _Step(step, now)
        if self._is_due():
            self._read_losses()
        self._resolve(wait=False)

    def finish(self) -> None:
        """The last step ends, with reading losses that are due; waits for the device."""
        self._close(self.clock.mark())
        self._current = self._no_step
        if self._is_due():
            self._read_losses()
            self._closed[-1].end = self.clock.mark()
        self._read_losses()
        self._resolve(wait=True)

    def forward_ends(self) -> None:
        """The model's output is there; where several forwards make a step, all before the last one's end counts as forward."""
        self._current.last_forward_end = self.clock.mark()

    def now(self) -> Mark | None:
        """A mark, where anything is remembered."""
        return self.clock.mark() if self._remembers else None

    def started(self, bucket: int, begin: Mark | None) -> None:
        """Keep the span since ``begin`` in which the host packed a bucket and started its operations."""
        if self._remembers:
            self._stretches.append(TimedSpan(self._current.step, start_name(bucket), begin, self.now(), is_host=True))

    def backward_ends(self) -> None:
        """The last gradient is there."""
        step = self._current
        step.backward_end = self._mark = self.clock.mark()
        step.forward_end = step.last_forward_end
        if step.forward_end is not None:
            self._span("forward", step.start, step.forward_end)
            self._span("backward", step.forward_end, step.backward_end)

    def arrives(self, *, of_average: bool = False) -> None:
        """The rank is ready for what is, so far, the step's last collective; one of an average may be waited for in a later step."""
        step = self._current
        step.arrival = self.clock.mark()
        if of_average:
            self._flight = step.step, step.arrival

    def stall_begins(self) -> None:
        """A stall starts after the update: what lies between belongs to the update."""
        self.update_ends()
        step = self._current
        step.arrival = self._mark = step.updates[-1][1]
        if self._flight is not None and self._flight[0] != step.step:
            step.started = self._flight[1]
        self._local = "merge"

    def stall_ends(self) -> None:
        """The last collective has ended."""
        now = self.clock.mark()
        self._stalled(self._mark, now)
        self._mark = now

    def update_begins(self) -> None:
        """The optimizer starts."""
        self._mark = self.clock.mark()
        self._local = "update"

    def update_ends(self) -> None:
        """The parameters are those of the next step."""
        now = self.clock.mark()
        self._current.updates.append((self._mark, now))
        self._span(self._local, self._mark, now)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Count the time inside as a stall of the step under way, if there is one."""
        begin = self.clock.mark()
        yield
        self._stalled(begin, self.clock.mark())

    def closes_round(self, local_steps: int) -> None:
        """The step ends a round of so many steps."""
        self._current.local_steps = local_steps

    def sends(self, nbytes: int) -> None:
        """A collective was started that sends so many bytes."""
        self._current.bytes_sent += nbytes

    def loss(self, value: float | torch.Tensor) -> None:
        """The step's loss on this rank; a tensor of one element is copied on its device, and read later. Before any step it is dropped."""
        if self.keep:
            self._current.loss = value.detach().reshape(()).clone() if isinstance(value, torch.Tensor) else value

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time inside out of the step."""
        begin = self.clock.mark()
        yield
        self._current.pauses.append((begin, self.clock.mark()))

    @contextmanager
    def collective(self, operation: Operation, step: int, kind: str | None = None) -> Iterator[None]:
        """Times one collective, or the part ``kind`` of it; runs on its lane."""
        begin = self.now()
        yield
        if begin is not None:
            name = f"{kind or operation.kind} {operation.payload if operation.bucket is None else operation.bucket}"
            self._stretches.append(TimedSpan(step, name, begin, self.now(), operation.communicator))

    def handed_over(self, operation: Operation, step: int, queue_depth: int) -> Callable[[], None] | None:
        """The backend is about to be handed a collective, of which a communicator carries so many at once.

        What is returned is to be called as the collective ends, on any thread; none where nothing is remembered.
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
        """Make records and spans of what the device has passed; ``wait``: of everything."""
        while self._closed and not isinstance(self._closed[0].loss, torch.Tensor) and (wait or self.clock.passed(self._closed[0].end)):
            self.steps.append(self._timed(self._closed.popleft()))
        while self._stretches and (wait or self.clock.passed(self._stretches[0].end_ns)):  # lanes append from threads of theirs
            span = self._stretches.popleft()
            begin, end = self.clock.resolve([span.start_ns, span.end_ns])
            self.spans.append(dataclasses.replace(span, start_ns=begin, end_ns=end))

    def _timed(self, step: _Step) -> TimedStep:
        """All marks of a step are resolved at once, on one scale."""
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
    """Nanoseconds in all."""
    return sum(end - begin for begin, end in stretches)


def _overlap(stretches: list[tuple[int, int]], begin: int, end: int) -> int:
    """Nanoseconds of them between two moments: a stall lies there where an exchange came to its end, and was done again."""
    return sum(max(0, min(there, end) - max(here, begin)) for here, there in stretches)
